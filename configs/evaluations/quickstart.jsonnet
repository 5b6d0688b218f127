// Sampled as in training: 128 validation problems every 5 iterations, 512 test problems at the end.
{
  evaluation: {
    every: 5,
    rollout: { type: 'single_turn', max_tokens: 48 },
    sets: [
      { split: 'validation', problems: 128, samples: 4, while_training: true },
      { split: 'test', problems: 512, samples: 4 },
    ],
  },
}
