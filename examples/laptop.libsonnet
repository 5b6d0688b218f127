// Settings that the examples about sums share. Append them to an experiment of the quickstart.
{
  directory: 'experiments/examples',
  engines: { policy: { type: 'in_process' } },  // samples with PyTorch, in the run's own process
  // The weights that `treetune run --configs examples/one_file/sft.jsonnet` trains.
  model: { type: 'pretrained', name_or_path: 'experiments/one_file/quickstart/sft/checkpoints/last/policy' },
  iterations: 40,
  problems_per_iteration: 32,
  trainer+: { learning_rate: 1e-3, schedule: { type: 'warmup', steps: 3 } },
  checkpoints: { every: 40 },
  evaluation+: { every: 10, sets: [{ split: 'validation', problems: 100, samples: 4, while_training: true }] },
}
