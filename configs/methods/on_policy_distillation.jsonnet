// On-policy distillation: the policy learns, token by token, to become like a teacher on answers of its own. What they
// earn doesn't count. The teacher, a model of the same tokens, has to be given: credit+: { teacher: { type: 'pretrained', … } }.
{
  credit: { type: 'distillation' },
  trainer+: {
    advantage_normalisation: 'none',
    objective: { type: 'ppo', kl_coef: 1.0, kl_estimator: 'k1', kl_placement: 'advantage' },
  },
}
