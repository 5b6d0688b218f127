// PPO with a critic whose prompt has the answer, which the policy doesn't see.
(import 'ppo.jsonnet') + { experiment_name: 'hinted_sums/ppo_privileged', credit+: { critic+: { template: '#{gold}\n{prompt}' } } }
