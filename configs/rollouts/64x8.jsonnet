// 64 problems an iteration, 8 answers to each: 512 episodes. A problem comes once in an iteration and may
// come again in the next.
{
  rollout+: { samples: 8 },
  problems_per_iteration: 64,
  problem_sampling: 'between_iterations',
}
