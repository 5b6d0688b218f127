// On-policy distillation: the policy learns, token by token, to become like a teacher on answers of its own. What they
// earn doesn't count. The teacher is a model of the same tokens, given in place of null.
{
  credit: { type: 'distillation', teacher: error 'give credit.teacher, such as { type: "pretrained", name_or_path: ... }' },
  trainer+: {
    advantage_normalisation: 'none',
    objective: { type: 'ppo', kl_coef: 1.0, kl_estimator: 'k1', kl_placement: 'advantage' },
  },
}
