// The start model of the tiny Countdown: from random weights, on searches of a teacher who gives up early.
(import 'tiny.libsonnet')
+ (import '../methods/sft.jsonnet')
+ (import '../trainers/tiny_sft.jsonnet')
+ {
  experiment_name: 'countdown/tiny_sft',
  iterations: 12,
  problems_per_iteration: 6400,
  evaluation+: { every: null },
  checkpoints: { every: 12 },
}
