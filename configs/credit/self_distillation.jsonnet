// OPSD: the policy learns what it would say if the reference answer were in its prompt. Rewards don't count.
{
  credit: { type: 'self_distillation' },
  trainer+: { advantage_normalisation: 'none' },
}
