// MATH with the verdicts and steps of the VinePPO paper's code.
(import 'math.jsonnet') + {
  task+: {
    grader: { type: 'minerva' },
    steps: { type: 'math_reference' },
  },
}
