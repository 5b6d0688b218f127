// MATH with the step boundaries of the paper's code.
{ task+: { steps: { type: 'math_reference' } } }
