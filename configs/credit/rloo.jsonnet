// RLOO (Ahmadian et al., arXiv:2402.14740): reward minus the mean of the other answers.
{ credit: { type: 'rloo' } }
