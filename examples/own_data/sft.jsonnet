// Supervised fine-tuning: a tiny model with random weights learns the form of an answer from the reference answers.
(import 'quickstart/sft.jsonnet') + (import 'task.libsonnet') + {
  experiment_name: 'own_data/sft',
  model+: { layers: 2, alphabet: '\n0123456789>' },  // its tokens: the characters of the rows, and a newline
  iterations: 4,
  problems_per_iteration: 2000,
  trainer+: { minibatch_size: 32 },
}
