// SDPO (Hübotter et al., arXiv:2601.20802): the policy learns the tokens that would be likely if another right answer
// to the problem were in its prompt.
{
  credit: { type: 'self_distillation', context: 'right_answer' },
  trainer+: { advantage_normalisation: 'none' },
}
