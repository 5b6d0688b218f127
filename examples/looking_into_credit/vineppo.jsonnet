// VinePPO, with an analyzer that computes the advantages of other credits for the same answers.
(import 'quickstart/vineppo.jsonnet') + (import '../laptop.libsonnet') + {
  experiment_name: 'looking_into_credit/vineppo',
  iterations: 5,
  checkpoints: { every: 1, keep_every: 1 },
} + (import 'analyzers/credit_microscope.jsonnet')
