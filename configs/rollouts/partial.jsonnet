// Append it to a rollout 'single_turn': an iteration samples at most a quarter of an answer's limit, and unfinished
// answers are continued in the next one, under the new weights; truncated importance corrects for the old ones.
{
  // Alone, the rollout's own defaults.
  local sampled = if 'rollout' in super then super.rollout else { type: 'single_turn', max_tokens: 1024 },
  rollout: { type: 'partial', rollout: sampled, tokens_per_iteration: std.max(1, std.floor(self.rollout.max_tokens / 4)) },
} + (import '../objectives/importance_cap_2.jsonnet')
