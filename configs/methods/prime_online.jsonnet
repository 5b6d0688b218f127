// PRIME: process rewards from a reward model that starts as the start model and learns the outcomes of each
// iteration's answers. Rewards must be between 0 and 1.
{
  credit: { type: 'prime' },
  trainer+: {
    measure_kl: true,
    advantage_normalisation: 'whiten',
    objective: { type: 'ppo', kl_coef: 0.0 },
  },
}
