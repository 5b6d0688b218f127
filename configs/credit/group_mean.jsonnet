// Dr.GRPO: reward less the group's mean.
{ credit: { type: 'group', std: false } }
