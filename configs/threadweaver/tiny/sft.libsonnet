// What both start models of the tiny experiments with threads are made by. Small minibatches: a minute's
// tokens are too few for large ones. Each tree of a demonstration's calls computes what they share once.
(import '../../trainers/sft.jsonnet')
+ {
  rollout: { type: 'demonstrations' },
  credit: { type: 'none' },
  iterations: 5,
  problems_per_iteration: 3200,
  trainer+: {
    minibatch_size: 8,
    layout: 'tree',
    schedule+: { decay: 'linear' },
  },
  evaluation+: { every: null },
  checkpoints: { every: 5 },
}
