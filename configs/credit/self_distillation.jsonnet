// OPSD (Zhao et al., arXiv:2601.18734): the policy learns the tokens that would be likely if the reference answer
// were in its prompt. Rewards don't count.
{
  credit: { type: 'self_distillation' },
  trainer+: { advantage_normalisation: 'none' },
}
