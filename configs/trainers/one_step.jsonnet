// One clipped policy-gradient step a iteration over all its sequences; what tiny models learn from.
{
  trainer: {
    type: 'deepspeed',
    objective: { type: 'ppo' },
    learning_rate: 2e-4,
    schedule: { type: 'warmup', steps: 10 },
    advantage_normalisation: 'whiten',
    tokens_per_micro_batch: 8192,
  },
}
