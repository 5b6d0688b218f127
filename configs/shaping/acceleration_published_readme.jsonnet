// ThreadWeaver's reward as its README has it: a correct answer earns up to 0.1 more the shorter its critical path is
// than all of its own tokens (total / critical path - 1), a wrong one nothing. A thread that adds nothing raises it.
// Counted on the response alone, where the reference takes the prompt along.
{ shaping+: [
  { type: 'acceleration', form: 'ratio', reference: { type: 'total' }, threads: 'written', weight: 0.5, clip: 0.2 },
] }
