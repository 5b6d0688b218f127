// PPO: a critic with the squared error.
local hinted_sums = import '../lib/hinted_sums.libsonnet';
hinted_sums.policy_gradient('ppo', { credit: { type: 'gae', critic: { learning_rate: 1e-3 } } })
