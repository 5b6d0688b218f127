// Three continuations of each state, its value mixed with the next one's: unbiased.
{ credit: { type: 'monte_carlo', samples: 3, values: { type: 'com_mcs' } } }
