// Negative log-likelihood of demonstrations, 64 sequences a step.
{
  trainer: {
    type: 'deepspeed',
    objective: { type: 'mle' },
    learning_rate: 2e-3,
    schedule: { type: 'warmup', steps: 50, decay: 'cosine' },
    minibatch_size: 64,
    tokens_per_micro_batch: 8192,
  },
}
