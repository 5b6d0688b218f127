// treetune's own: three continuations of each state, and each value is smoothed along the answer from one side only,
// which keeps it unbiased.
{ credit: { type: 'monte_carlo', samples: 3, values: { type: 'filtered' } } }
