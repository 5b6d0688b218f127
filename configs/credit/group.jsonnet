// GRPO (Shao et al., arXiv:2402.03300): reward minus the group's mean, divided by its standard deviation.
{ credit: { type: 'group', std: true } }
