// treetune's own: three continuations of each state, and a baseline that uses the run's critic in proportion to its
// accuracy: unbiased.
{ credit: { type: 'monte_carlo', samples: 3, values: { type: 'control_variate' } } }
