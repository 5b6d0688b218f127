// TreePO's tree (Li et al., arXiv:2508.17445): two answers, which are continued in two ways at every 512th token until
// there are 16.
{
  rollout+: {
    type: 'tree',
    samples: 2,
    branching: { type: 'up_to_width', states: { type: 'every_n_tokens', tokens: 512 }, width: 16, most_ways: 2 },
  },
}
