// One clipped policy-gradient step an iteration over all its sequences; what tiny models learn from.
{
  trainer: {
    type: 'deepspeed',
    objective: { type: 'ppo' },
    learning_rate: 4e-4,
    schedule: { type: 'warmup', steps: 10 },
    advantage_normalisation: 'whiten',
    tokens_per_micro_batch: 8192,
  },
}
