// GRPO: reward less the group's mean, over its standard deviation.
{ credit: { type: 'group', std: true } }
