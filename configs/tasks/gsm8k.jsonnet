// GSM8K, graded by value, one step a line. The files are the data set's own; {problem} is where one goes.
{
  task: {
    type: 'gsm8k',
    train: ['data/gsm8k/train.jsonl'],
    test: ['data/gsm8k/test.jsonl'],
    validation_size: 373,
    prompt: '[MATH_TASK] Problem:\n{problem}\n\nSolution:',
    grader: { type: 'numeric' },
    steps: { type: 'lines' },
  },
}
