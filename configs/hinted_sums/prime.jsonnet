// PRIME's advantages with the reward model of reward_model.jsonnet, which doesn't learn.
(import '../lib/hinted_sums.libsonnet').policy_gradient('prime', (import '../methods/prime.jsonnet') + {
  credit+: {
    beta: 0.3,
    reward_model: { type: 'pretrained', name_or_path: $.directory + '/hinted_sums/reward_model/checkpoints/last/policy' },
  },
})
