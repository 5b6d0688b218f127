// What the examples about sums share, for the right of a quickstart's experiment: sampled in the run's own process, begun with
// the weights that examples/one_file/sft.jsonnet makes, 15 iterations of 32 problems, and measured every five.
{
  directory: 'experiments/examples',
  engines: { policy: { type: 'in_process' } },
  model: { type: 'pretrained', name_or_path: 'experiments/one_file/quickstart/sft/checkpoints/last/policy' },
  iterations: 15,
  problems_per_iteration: 32,
  trainer+: { learning_rate: 1e-3, schedule: { type: 'warmup', steps: 3 } },
  checkpoints: { every: 15 },
  evaluation+: { every: 5, sets: [{ split: 'validation', problems: 100, samples: 4, while_training: true }] },
}
