// A newline ends a step, whatever comes next: the gradient of Monte-Carlo credit is unbiased without a condition.
{ task+: { steps: { type: 'lines', newline: 'ends' } } }
