// C3's replay (Chen et al., arXiv:2603.06859): at each turn, three alternatives are sampled in the same context and played
// to the end. The turn's credit is what the answer earned minus the mean of what the alternatives earned.
{ credit: { type: 'monte_carlo', samples: 3, states: { type: 'turns' }, lam: 1.0 } }
