// The task of both experiments: rows with the fields `question` and `answer`, and a function that grades answers.
{
  directory: 'experiments/examples',
  engines: { policy: { type: 'in_process' } },
  task: {
    type: 'questions',
    train: ['data/digits/train.jsonl'],
    test: ['data/digits/test.jsonl'],
    validation_size: 100,  // rows of train.jsonl that are held out
    problem_field: 'question',
    gold_field: 'answer',
    prompt: '{problem}',  // the question alone
    grader: { type: 'function', path: 'reward:score' },  // the function `score` in reward.py
  },
  evaluation+: { every: 5, sets: [{ split: 'test', samples: 4, while_training: true }] },
}
