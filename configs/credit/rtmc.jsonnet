// RTMC (arXiv:2604.11037): values of common beginnings, drawn towards the group's mean.
{ credit: { type: 'monte_carlo', samples: 1, values: { type: 'rtmc' } } }
