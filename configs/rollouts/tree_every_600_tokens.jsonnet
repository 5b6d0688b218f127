// SPO-tree's tree (Guo et al., arXiv:2505.23564): six answers, each continued in six ways after 600 tokens, and
// these in six ways after 1,200: 216 at most.
{
  rollout+: {
    type: 'tree',
    samples: 6,
    branching: { type: 'at_states', states: { type: 'every_n_tokens', tokens: 600 }, ways: [6, 6] },
  },
}
