// A bound for tokens of negative advantage that have become much likelier (Ye et al., arXiv:1912.09729, eq. 5).
{ trainer+: { objective+: { dual_clip: 3.0 } } }
