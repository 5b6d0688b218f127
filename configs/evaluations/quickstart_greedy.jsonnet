// The quickstart's sets, and the same problems answered once, greedily. Append it to an experiment.
{
  evaluation+: {
    sets+: [
      { name: 'validation_greedy', split: 'validation', problems: 128, temperature: 0, while_training: true },
      { name: 'test_greedy', split: 'test', problems: 512, temperature: 0 },
    ],
  },
}
