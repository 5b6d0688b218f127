// OlympiadBench, the open-ended English problems in text alone. No split to train on.
{
  task: {
    type: 'olympiadbench',
    test: ['data/olympiadbench/test.jsonl'],
    prompt: '[MATH_TASK] Problem:\n{problem}\n\nSolution:',
    grader: { type: 'math' },
    steps: { type: 'math' },
  },
}
