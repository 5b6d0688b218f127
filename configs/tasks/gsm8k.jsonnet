// GSM8K, graded by value, one step a line. The files are the data set's own.
{
  task: {
    type: 'gsm8k',
    train: ['data/gsm8k/train.jsonl'],
    test: ['data/gsm8k/test.jsonl'],
    validation_size: 373,
    grader: { type: 'numeric' },
    steps: { type: 'lines' },
  },
}
