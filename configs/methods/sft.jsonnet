// Supervised fine-tuning: negative log-likelihood of the task's own solutions.
{
  rollout: { type: 'demonstrations' },
  credit: { type: 'none' },
  selection: { type: 'all' },
  trainer+: { objective+: { type: 'mle' } },
}
