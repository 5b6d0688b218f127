// Rows with the fields `question` and `answer`, and the function that grades answers to them.
{
  directory: 'experiments/examples',
  engines: { policy: { type: 'in_process' } },
  task: {
    type: 'gsm8k',
    train: ['data/digits/train.jsonl'],
    test: ['data/digits/test.jsonl'],
    validation_size: 100,
    problem_field: 'question',
    gold_field: 'answer',
    prompt: '{problem}',
    grader: { type: 'function', path: 'reward:score' },
  },
  evaluation+: { every: 5, sets: [{ split: 'test', samples: 4, while_training: true }] },
}
