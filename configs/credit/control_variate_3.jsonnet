// Three continuations of each state, held against a baseline that leans on the run's critic as far as that is right: unbiased.
{ credit: { type: 'monte_carlo', samples: 3, values: { type: 'control_variate' } } }
