// Branching in the tail (BranPO, Zhao et al., arXiv:2602.03719), for an experiment whose rollout is single_turn: four
// answers, each continued in two ways from its last step. Needs the credit 'tree'.
{
  rollout+: {
    type: 'tree',
    samples: 4,
    branching: { type: 'last_states', states: { type: 'step_boundaries' }, count: 1, ways: 2 },
  },
}
