// Estimates how hard each row is for the start model of the examples about sums: the share of correct answers among
// eight. `treetune estimate_difficulty` reads this file.
{
  type: 'estimate_difficulty',
  task: { type: 'rows', routes: { task__addition_chain: { type: 'final_answer', marker: '#' } } },
  policy: {
    type: 'served',
    model: { type: 'pretrained', name_or_path: 'experiments/one_file/quickstart/sft/checkpoints/last/policy' },
    engine: { type: 'in_process' },
    context_length: 128,
  },
  answers: { samples: 8, max_tokens: 48 },
  column: 'pass_rate',  // the rows get this column
}
