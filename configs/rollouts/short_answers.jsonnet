// Eight answers of at most 48 characters to each of 64 problems.
{
  rollout: { type: 'single_turn', samples: 8, max_tokens: 48 },
  problems_per_iteration: 64,
}
