// TRACE as in the paper (Tao et al., arXiv:2607.13988): the frozen reference scores, which is the start model here.
{
  credit: { type: 'trace', scorer: 'reference' },
  trainer+: { measure_kl: true },
}
