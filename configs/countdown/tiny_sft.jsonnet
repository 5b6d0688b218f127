// The start model of the tiny Countdown: from random weights, on searches of a teacher who gives up early.
(import 'tiny.jsonnet')
+ (import '../trainers/sft.jsonnet')
+ {
  experiment_name: 'countdown/tiny_sft',
  rollout: { type: 'demonstrations' },
  credit: { type: 'none' },
  iterations: 12,
  problems_per_iteration: 6400,
  evaluation+: { every: null },
  checkpoints: { every: 12 },
}
