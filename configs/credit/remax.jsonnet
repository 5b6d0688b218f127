// ReMax (arXiv:2310.10505): reward minus the reward of a greedy answer to the same problem: unbiased.
{ credit: { type: 'remax' } }
