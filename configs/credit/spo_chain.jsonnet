// SPO-chain (Guo et al., arXiv:2505.23564): continuations before every fifth token that the policy was unsure of;
// likelier tokens are not trained.
{
  credit: {
    type: 'probability_mask',
    below: 0.9,
    over: { type: 'monte_carlo', samples: 9, states: { type: 'low_probability', begin_with: true } },
  },
}
