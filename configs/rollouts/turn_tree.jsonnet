// A tree of turns, for an experiment whose rollout is multi_turn: four answers, each of which continues in
// two ways after its first turn, and each of these in two ways after its second. Up to 16 answers. Needs the
// credit 'tree'.
{
  rollout+: {
    type: 'turn_tree',
    samples: 4,
    branching: { type: 'at_states', states: { type: 'turns' }, ways: [2, 2] },
  },
}
