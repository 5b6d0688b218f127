// Three to seven things in a row, from clues such as "the wren is somewhere to the left of the crow"; in words.
{
  task: {
    type: 'ordering_puzzles',
    objects: [3, 7],
    clues: ['left', 'next', 'between'],
    train_size: 10000,
    validation_size: 500,
    test_size: 1000,
    grader: { type: 'ordering' },
  },
}
