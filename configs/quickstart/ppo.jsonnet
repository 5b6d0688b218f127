// PPO: advantages from a critic, by GAE.
local quickstart = import '../lib/quickstart.libsonnet';
quickstart.policy_gradient('ppo', import '../methods/ppo.jsonnet')
+ { credit+: { critic+: { learning_rate: 1e-3 } } }
