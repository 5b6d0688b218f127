// TreeRL's tree (Hou et al., arXiv:2506.11902): six answers, and before the two least probable tokens of each two
// further ones: 30.
{
  rollout+: {
    type: 'tree',
    samples: 6,
    branching: { type: 'least_sure', positions: 2, ways: 2, rounds: 1 },
  },
}
