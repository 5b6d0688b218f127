// A tiny model learns the form of an answer from the rows, before it learns from the reward.
(import 'quickstart/sft.jsonnet') + (import 'task.libsonnet') + {
  experiment_name: 'own_data/sft',
  model+: { layers: 2, alphabet: '\n0123456789>' },
  iterations: 4,
  problems_per_iteration: 2000,
  trainer+: { minibatch_size: 32 },
}
