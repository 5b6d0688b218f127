// TEMPO's values (Tran et al., arXiv:2509.18314): the mean reward of the other answers through a state. Nothing is
// sampled for it.
{ credit: { type: 'monte_carlo', values: { type: 'siblings' } } }
