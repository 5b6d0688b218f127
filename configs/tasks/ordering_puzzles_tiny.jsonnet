// Three or four letters in a row, in symbols: `dba:b<a,d/a>` asks for `bda`. Prompts of up to 23 characters, solutions
// of up to 45; a teacher who passes one in five refuted orders off for the answer.
{
  task: {
    type: 'ordering_puzzles',
    wording: 'symbols',
    objects: [3, 4],
    clues: ['left', 'next', 'between'],
    letters: 7,
    demonstration_noise: 0.2,
    train_size: 10000,
    validation_size: 500,
    test_size: 1000,
    grader: { type: 'ordering', opening: '#', closing: '\n', unclosed: true },
  },
}
