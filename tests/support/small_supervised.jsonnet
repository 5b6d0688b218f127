// The small experiment without a server: it learns solutions, with a checkpoint after each of six iterations.
(import 'small.jsonnet') + {
  experiment_name: 'small_supervised',
  rollout: { type: 'demonstrations' },
  credit: { type: 'none' },
  trainer+: { objective: { type: 'mle' }, minibatch_size: 16 },
  iterations: 6,
  problems_per_iteration: 64,
  checkpoints: { every: 1, keep_every: 1 },
}
