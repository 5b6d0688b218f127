// What tiny models learn demonstrations with: 64 sequences a step at a rate that stays high to the end. Weights that settled
// under it bear the noise of the first policy-gradient steps, which those of a decayed rate don't (0.65 instead of 0.34).
{
  trainer+: {
    learning_rate: 2e-3,
    schedule: { type: 'warmup', steps: 50 },
    minibatch_size: 64,
    tokens_per_micro_batch: 8192,
  },
}
