// Sums over answers are divided by the longest length that an answer may have, for all the same: neither
// short correct ones nor long wrong ones are favoured (Dr. GRPO, Liu et al., arXiv:2503.20783).
local longest = import '../rollouts/longest_answer.libsonnet';
{
  trainer+: {
    objective+: {
      aggregation: 'constant',
      constant_length: longest(std.get($, 'rollout')),
    },
  },
}
