// RestEM (Singh et al., arXiv:2312.06585): the policy's own correct answers, at most 10 to a problem, are learnt from the
// start weights anew in every iteration, each answer weighing the same.
{
  credit: { type: 'none' },
  selection: { type: 'correct_only', max_per_problem: 10 },
  trainer+: { objective+: { type: 'mle', aggregation: 'sequence' } },
  restart: 'every_iteration',
}
