// ThreadWeaver's reward as its code has it (reward v2 with the shipped settings, 1.0 * 0.5 and a clip of 0.2): a right
// answer earns up to 0.1 more, by 1 - critical path / all of its own tokens; a wrong one earns -1. A thread that adds
// nothing raises it. Counted on the response alone, where the reference takes the prompt along.
{ shaping+: [
  { type: 'acceleration', form: 'saved', reference: { type: 'total' }, threads: 'written', weight: 0.5, clip: 0.2 },
  { type: 'wrong_answers', penalty: 1.0 },
] }
