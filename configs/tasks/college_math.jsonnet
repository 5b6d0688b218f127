// CollegeMath: 2,818 exercises to measure models on that were trained on MATH. No split to train on.
{
  task: {
    type: 'college_math',
    test: ['data/college_math/test.jsonl'],
    prompt: '[MATH_TASK] Problem:\n{problem}\n\nSolution:',
    grader: { type: 'math' },
    steps: { type: 'math' },
  },
}
