// Five times the correct ones of a fifth of the budget. Validation says how many epochs are good.
{
  problems_per_iteration: 189,
  trainer+: {
    learning_rate: 1e-3,
    schedule: { type: 'warmup', steps: 10, decay: 'linear' },
    minibatch_size: 64,
    epochs: 3,
  },
  choose_checkpoint: { set: 'validation', rule: 'best' },
  evaluation+: { every: 1 },
}
