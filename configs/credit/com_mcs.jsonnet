// ComMCS (Sun et al., arXiv:2508.10539): three continuations of each state, and its value is mixed with the next
// state's: unbiased.
{ credit: { type: 'monte_carlo', samples: 3, values: { type: 'com_mcs' } } }
