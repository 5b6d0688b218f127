// The start model of the tiny experiments on five domains: from random weights, on demonstrations of teachers who
// make mistakes. Minibatches of 16: so few tokens teach more in many steps. Thousands of teachers' programs aren't
// run one by one.
(import 'tiny.libsonnet')
+ (import '../methods/sft.jsonnet')
+ (import '../trainers/tiny_sft.jsonnet')
+ {
  experiment_name: 'domains/tiny_sft',
  iterations: 12,
  problems_per_iteration: 6400,
  task+: { domains+: { code+: { weight: 1 } } },
  rollout+: { graded: false },
  trainer+: { learning_rate: 1e-3, minibatch_size: 16 },
  evaluation+: { every: null },
  checkpoints: { every: 12 },
}
