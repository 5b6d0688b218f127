// The first of three to eight steps of a proof, among the first steps of four others, in words.
{
  task: {
    type: 'graph_paths',
    lookahead: [3, 8],
    paths: 5,
    extra: 6,
    train_size: 5000,
    validation_size: 500,
    test_size: 1000,
    grader: { type: 'one_word' },
  },
}
