// Products of 5 to 8 factors between 0 and 1000, asked in words and boxed: ThreadWeaver's problems, and as many of
// them. The test problems are ours. Its solutions are not published. Ours go digit by digit, so that there is
// something to share out: 6,000 to 7,000 tokens on average and up to 16,000, where the published ones have 4,000.
{
  task: {
    type: 'multiplication',
    factors: [5, 8],
    min_value: 0,
    max_value: 1000,
    detail: 'digits',
    wording: 'words',
    grader: { type: 'numeric', without_marker: 'boxed' },
    train_size: 10000,
    validation_size: 1000,
    test_size: 1000,
  },
}
