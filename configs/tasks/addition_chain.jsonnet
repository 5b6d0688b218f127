// Add four two-digit numbers, one running total a line; a teacher who makes mistakes on 12 % of the lines.
{
  task: {
    type: 'addition_chain',
    count: 4,
    digits: 2,
    demonstration_noise: 0.12,
    train_size: 100000,
    validation_size: 500,
    test_size: 1000,
  },
}
