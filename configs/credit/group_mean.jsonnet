// Dr. GRPO (Liu et al., arXiv:2503.20783): reward minus the group's mean.
{ credit: { type: 'group', std: false } }
