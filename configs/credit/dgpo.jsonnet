// DGPO (Jin et al., arXiv:2605.03327): GRPO's advantages, distributed over the tokens of an answer by how far the
// policy has moved from the start model.
{
  credit: { type: 'weighted_by', over: { type: 'group' }, signal: 'deviation', weights: 'softmax' },
  trainer+: { measure_kl: true },
}
