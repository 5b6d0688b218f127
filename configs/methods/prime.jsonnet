// PRIME's advantages with an implicit reward model that is given and doesn't learn. The model, one of the same tokens,
// has to be named: credit+: { reward_model: { type: 'pretrained', … } }. It is the trainer's reference model.
{
  credit: { type: 'implicit_reward' },
  trainer+: {
    measure_kl: true,
    advantage_normalisation: 'whiten',
    objective: { type: 'ppo', kl_coef: 0.0 },
  },
}
