// MATH with the verdicts of the paper's code, right and wrong.
{ task+: { grader: { type: 'minerva' } } }
