// Negative log-likelihood of demonstrations, 64 sequences a step.
// The rate stays high to the end: weights that settled under it bear the noise of the first
// policy-gradient steps, which those of a decayed rate (0.65 instead of 0.34 here) don't.
{
  trainer: {
    type: 'deepspeed',
    objective: { type: 'mle' },
    learning_rate: 2e-3,
    schedule: { type: 'warmup', steps: 50 },
    minibatch_size: 64,
    tokens_per_micro_batch: 8192,
  },
}
