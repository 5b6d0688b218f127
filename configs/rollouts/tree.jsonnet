// A tree of answers, for an experiment whose rollout is single_turn: four from the prompt, each continued in two
// ways from the end of its first step, and these in two ways from the end of their second. Needs the credit
// 'tree'.
{
  rollout+: {
    type: 'tree',
    samples: 4,
    branching: { type: 'at_states', states: { type: 'step_boundaries' }, ways: [2, 2] },
  },
}
