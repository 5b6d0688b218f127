// Three times the correct ones of a third of the budget. Validation says how many epochs are good.
{
  problems_per_iteration: 70,
  trainer+: {
    schedule: { type: 'warmup', steps: 10, decay: 'linear' },
    minibatch_size: 32,
    epochs: 6,
  },
  choose_checkpoint: { set: 'validation', rule: 'best' },
  evaluation+: { every: 1 },
}
