// Optimal token baseline (arXiv:2602.07078): a baseline for each position of a group, from answers weighted by the
// energy of their paths.
{ credit: { type: 'optimal_token_baseline' } }
