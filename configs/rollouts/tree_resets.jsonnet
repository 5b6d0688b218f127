// Answers from the prompt, and four continuations of each wrong one from a step drawn at random, for an experiment whose
// rollout is single_turn. Use it with the credit 'resets'.
{
  rollout+: {
    type: 'tree',
    branching: { type: 'resets', states: { type: 'step_boundaries' }, ways: 4 },
  },
}
