// How hard each row is for the quickstart's start model: eight answers to each.
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
  column: 'pass_rate',
}
