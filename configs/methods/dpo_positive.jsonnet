// DPO-positive (Pal et al., arXiv:2402.13228): a correct answer against a wrong one to the same problem, and a penalty
// where the correct one becomes less likely than it was.
{
  credit: { type: 'none' },
  selection: { type: 'preference_pairs' },
  trainer+: { objective+: { type: 'dpo_positive' } },
}
