// 64 answers to every training problem.
{
  rollout+: { samples: 64 },
  problems_per_iteration: null,
  problem_sampling: 'epochs',
}
