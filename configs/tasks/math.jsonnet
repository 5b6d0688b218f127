// MATH, 12,000 problems to train on and MATH-500 to test on, as prepared by
// scripts/download_and_prepare_datasets.sh. Graded by what the boxed answer says.
{
  task: {
    type: 'math',
    train: ['data/math/train.jsonl'],
    test: ['data/math/test.jsonl'],
    validation_size: 500,
    prompt: '[MATH_TASK] Problem:\n{problem}\n\nSolution:',
    grader: { type: 'math' },
    steps: { type: 'math' },
  },
}
