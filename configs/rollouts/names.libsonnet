// Further configurations of this folder, each under its name: configs/rollouts/NAME.jsonnet is the field NAME.
{
  // Answers that grow out of each other, for an experiment whose rollout is single_turn: four from the prompt, each of
  // which goes on in two ways from its first step's end, and these in two ways from their second's. Wants the credit
  // 'tree'.
  tree: {
    rollout+: {
      type: 'tree',
      samples: 4,
      branching: { type: 'at_states', states: { type: 'step_boundaries' }, ways: [2, 2] },
    },
  },

  // SPO-tree's tree (Guo et al., arXiv:2505.23564): six answers, each of which goes on in six ways after 600 tokens, and
  // these in six ways after 1,200: 216 at most.
  tree_every_600_tokens: {
    rollout+: {
      type: 'tree',
      samples: 6,
      branching: { type: 'at_states', states: { type: 'every_n_tokens', tokens: 600 }, ways: [6, 6] },
    },
  },

  // TreeRL's tree (Hou et al., arXiv:2506.11902): six answers, and before the two least probable tokens of each two
  // further ones: 30.
  tree_least_sure: {
    rollout+: {
      type: 'tree',
      samples: 6,
      branching: { type: 'least_sure', positions: 2, ways: 2, rounds: 1 },
    },
  },

  // Four answers, and before the three least probable tokens of each one further: 16, for the tokens of eight or so. Wants the
  // credit 'tree'.
  tree_unsure: {
    rollout+: {
      type: 'tree',
      samples: 4,
      branching: { type: 'least_sure', positions: 3, ways: 1 },
    },
  },

  // TreePO's tree (Li et al., arXiv:2508.17445): two answers, which go on in two ways at every 512th token until there
  // are 16.
  tree_up_to_width: {
    rollout+: {
      type: 'tree',
      samples: 2,
      branching: { type: 'up_to_width', states: { type: 'every_n_tokens', tokens: 512 }, width: 16, most_ways: 2 },
    },
  },
}
