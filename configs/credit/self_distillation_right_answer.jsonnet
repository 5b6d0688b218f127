// SDPO: the policy learns what it would say if another right answer to the problem were in its prompt.
{
  credit: { type: 'self_distillation', context: 'right_answer' },
  trainer+: { advantage_normalisation: 'none' },
}
