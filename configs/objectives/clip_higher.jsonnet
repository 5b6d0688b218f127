// More room upwards than downwards, so that rare tokens can become likely (DAPO, arXiv:2503.14476, eq. 10).
{ trainer+: { objective+: { clip_low: 0.2, clip_high: 0.28 } } }
