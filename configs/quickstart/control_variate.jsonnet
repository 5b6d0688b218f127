// VinePPO with 3 continuations a state and the critic as their control variate.
local quickstart = import '../lib/quickstart.libsonnet';
quickstart.policy_gradient('control_variate', (import '../methods/ppo_loss.jsonnet') + (import '../credit/control_variate_3.jsonnet'))
+ { credit+: { values+: { critic: { learning_rate: 1e-3 } } } }
