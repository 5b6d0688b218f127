// ReMax: reward minus the reward of a greedy answer to the same problem: unbiased.
{ credit: { type: 'remax' } }
