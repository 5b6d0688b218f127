// GDPO (Liu et al., arXiv:2601.05242): the grader's reward and its other numbers, each normalised in the group, then
// added and normalised over all tokens. Add the numbers of your reward function, such as 'rewards/format': 0.2.
{
  credit: { type: 'gdpo', parts: { score: 1.0 } },
  trainer+: { advantage_normalisation: 'whiten' },
}
