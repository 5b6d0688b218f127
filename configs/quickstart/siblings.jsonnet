// The quickstart with step values from the other answers through a state, for which nothing is sampled
// (docs/results/credit_training.md).
(import '../lib/quickstart.libsonnet').policy_gradient(
  'siblings', (import '../methods/ppo_loss.jsonnet') + (import '../credit/siblings.jsonnet')
)
