// Multiply two two-digit numbers in partial products.
{
  task: {
    type: 'multiplication',
    factors: 2,
    digits: 2,
    demonstration_noise: 0.12,
    train_size: 2500,
    validation_size: 500,
    test_size: 1000,
  },
}
