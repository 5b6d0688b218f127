// Add six one-digit numbers, one running total a line; a teacher who makes mistakes on 12 % of the lines. Prompts
// have no hint.
{
  task: {
    type: 'hinted_sums',
    count: 6,
    digits: 1,
    demonstration_noise: 0.12,
    train_size: 2500,
    validation_size: 200,
    test_size: 300,
  },
}
