// VinePPO, and a microscope on some answers: what other credits would have given each step.
(import 'quickstart/vineppo.jsonnet') + (import '../laptop.libsonnet') + {
  experiment_name: 'looking_into_credit/vineppo',
  iterations: 5,
  checkpoints: { every: 1, keep_every: 1 },
} + (import 'analyzers/credit_microscope.jsonnet')
