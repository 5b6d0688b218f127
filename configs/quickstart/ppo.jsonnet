// PPO.
local quickstart = import '../lib/quickstart.libsonnet';
quickstart.policy_gradient('ppo', import '../methods/ppo.jsonnet')
+ { credit+: { critic+: { learning_rate: 1e-3 } } }
