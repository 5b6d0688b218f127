// VinePPO's experiment with the critic's values at the states, and no continuations.
local quickstart = import '../lib/quickstart.libsonnet';
quickstart.policy_gradient('critic_values', (import '../methods/ppo_loss.jsonnet') + (import '../credit/critic_values.jsonnet'))
+ { credit+: { values+: { critic: { learning_rate: 1e-3 } } } }
