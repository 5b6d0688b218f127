// For the right of an experiment: rows of one's own, with fields of one's own, and no code.
{
  experiment_name: 'own_rows',
  problems_per_iteration: null,  // all of them: these rows are few
  task: {
    type: 'gsm8k',
    train: ['examples/own_parts/questions.jsonl'],
    test: ['examples/own_parts/questions.jsonl'],
    validation_size: 1,
    problem_field: 'text',
    gold_field: 'solution',
    keep: ['level'],
    prompt: 'Question: {problem}\nAnswer:',
  },
}
