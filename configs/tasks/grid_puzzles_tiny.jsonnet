// Grids of three by three with one or two rules, which the prompt states in symbols: `mt:120/031/222>` asks for the
// mirrored and then transposed one. Prompts of up to 20 characters, solutions of up to 36; a teacher who makes
// mistakes on one line in eight.
{
  task: {
    type: 'grid_puzzles',
    wording: 'symbols',
    rows: [3, 3],
    columns: [3, 3],
    colours: 4,
    rules: ['mirror', 'flip', 'transpose', 'turn', 'shift_right', 'shift_down', 'fall', 'recolour', 'fill'],
    steps: [1, 2],
    shown: 0,
    demonstration_noise: 0.12,
    train_size: 10000,
    validation_size: 500,
    test_size: 1000,
    grader: { type: 'grid', opening: '#', closing: '\n', unclosed: true },
  },
}
