// Multiply a number of three digits by one of two, digit by digit, a thread for each of the two places; a teacher who
// makes mistakes on 4 % of the lines. Solutions have about 125 tokens in the sequential form; in threads 151, of
// which 103 lie on the critical path (the longest are 171 and 114).
{
  task: {
    type: 'multiplication',
    factors: 2,
    first_digits: 3,
    digits: 2,
    detail: 'digits',
    form: 'digits',
    demonstration_noise: 0.04,
    train_size: 50000,
    validation_size: 500,
    test_size: 1000,
  },
}
