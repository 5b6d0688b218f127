// Answers that grow out of each other, for an experiment whose rollout is single_turn: four from the prompt, each of
// which goes on in two ways from its first step's end, and these in two ways from their second's. Wants the credit
// 'tree'.
{
  rollout+: {
    type: 'tree',
    samples: 4,
    branching: { type: 'at_states', states: { type: 'step_boundaries' }, ways: [2, 2] },
  },
}
