// The start model: from random weights, on demonstrations of a teacher who slips.
(import 'base.jsonnet')
+ (import '../trainers/sft.jsonnet')
+ {
  experiment_name: 'quickstart/sft',
  rollout: { type: 'demonstrations' },
  credit: { type: 'none' },
  iterations: 12,
  problems_per_iteration: 6400,
  evaluation+: { every: null },
  checkpoints: { every: 12 },
}
