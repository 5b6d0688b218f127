// 8 answers to every training problem.
{
  rollout+: { samples: 8 },
  problems_per_iteration: null,
  problem_sampling: 'epochs',
}
