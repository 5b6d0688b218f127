// Branching in the tail (BranPO, Zhao et al., arXiv:2602.03719), for an experiment whose rollout is multi_turn: four
// answers, each continued in two ways before its last turn. Needs the credit 'tree'.
{
  rollout+: {
    type: 'turn_tree',
    samples: 4,
    branching: { type: 'last_states', states: { type: 'turns' }, count: 1, ways: 2 },
  },
}
