// Three or four people in a row who differ in two or three things, in words, with all kinds of clues.
{
  task: {
    type: 'zebra_puzzles',
    objects: [3, 4],
    attributes: [2, 3],
    level: 12,
    train_size: 5000,
    validation_size: 500,
    test_size: 1000,
    grader: { type: 'zebra', score: 'cells' },
  },
}
