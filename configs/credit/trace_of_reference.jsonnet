// TRACE as in the paper: the frozen reference scores, which is the start model here.
{
  credit: { type: 'trace', scorer: 'reference' },
  trainer+: { measure_kl: true },
}
