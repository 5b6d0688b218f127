// Three continuations of each state, each value seen from one side along the answer: smoothing without its bias.
{ credit: { type: 'monte_carlo', samples: 3, values: { type: 'filtered' } } }
