// GRPO and, where answers part, the change of their mean reward.
{ credit: { type: 'tempo' } }
