// What the examples about sums share, for the right of a quickstart's experiment: sampled in the run's own process, begun with
// the weights that examples/one_file/sft.jsonnet makes, 40 iterations of 32 problems, and measured every ten.
{
  directory: 'experiments/examples',
  engines: { policy: { type: 'in_process' } },
  model: { type: 'pretrained', name_or_path: 'experiments/one_file/quickstart/sft/checkpoints/last/policy' },
  iterations: 40,
  problems_per_iteration: 32,
  trainer+: { learning_rate: 1e-3, schedule: { type: 'warmup', steps: 3 } },
  checkpoints: { every: 40 },
  evaluation+: { every: 10, sets: [{ split: 'validation', problems: 100, samples: 4, while_training: true }] },
}
