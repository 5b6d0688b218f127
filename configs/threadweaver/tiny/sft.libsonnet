// What both start models of the tiny experiments with threads are made by. Minibatches of 8: so few tokens teach more
// in many steps. The tree computes once what a demonstration's calls begin with alike.
(import '../../methods/sft.jsonnet')
+ (import '../../trainers/tiny_sft.jsonnet')
+ {
  iterations: 6,
  problems_per_iteration: 3200,
  trainer+: {
    learning_rate: 1.5e-3,
    minibatch_size: 8,
    layout: 'tree',
    schedule+: { decay: 'linear' },
  },
  evaluation+: { every: null },
  checkpoints: { every: 6 },
}
