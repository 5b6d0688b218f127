// VinePPO's values (Kazemnejad et al., arXiv:2410.01679) with three continuations of each state.
{ credit: { type: 'monte_carlo', samples: 3 } }
