// Every token weighs the same, so long answers weigh more (DAPO, arXiv:2503.14476, eq. 12).
{ trainer+: { objective+: { aggregation: 'token', constant_length: null } } }
