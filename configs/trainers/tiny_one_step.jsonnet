// What tiny models learn from their own answers with: one step an iteration over all its sequences.
{
  trainer+: {
    learning_rate: 4e-4,
    schedule: { type: 'warmup', steps: 10 },
    advantage_normalisation: 'whiten',
    tokens_per_micro_batch: 8192,
  },
}
