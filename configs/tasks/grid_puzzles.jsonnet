// Grids that one or two rules change, to be found from three examples, in words: ARC's kind of question.
{
  task: {
    type: 'grid_puzzles',
    rows: [2, 6],
    columns: [2, 6],
    colours: 5,
    steps: [1, 2],
    shown: 3,
    train_size: 5000,
    validation_size: 500,
    test_size: 1000,
    grader: { type: 'grid' },
  },
}
