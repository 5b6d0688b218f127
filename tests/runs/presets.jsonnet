// What presets go on the right of: the small experiment, with an engine that answers all at once, answers of
// both kinds, and minibatches enough for ratios to leave 1.
(import '../../tests/support/small.jsonnet')
+ {
  engines+: { policy+: { max_concurrency: 64 } },
  rollout+: { samples: 4, max_tokens: 16 },
  credit: null,
  trainer+: { objective: null, advantage_normalisation: 'none', epochs: 2 },
  iterations: 2,
  checkpoints: { every: 1, keep_every: 1 },
}
