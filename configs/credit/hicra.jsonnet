// HICRA (Wang et al., arXiv:2509.03646): GRPO's advantages, higher at tokens that plan: the paper's examples of such
// phrases.
{
  credit: {
    type: 'hicra',
    over: { type: 'group' },
    phrases: ['we can use the fact that', "let's try a different approach", 'but the problem mentions that'],
  },
}
