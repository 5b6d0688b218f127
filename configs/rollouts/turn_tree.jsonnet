// A tree of turns, for an experiment whose rollout is multi_turn: four answers, each continued in two ways after its
// first turn, and these in two ways after their second. Needs the credit 'tree'.
{
  rollout+: {
    type: 'turn_tree',
    samples: 4,
    branching: { type: 'at_states', states: { type: 'turns' }, ways: [2, 2] },
  },
}
