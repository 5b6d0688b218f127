// SDPO on top-k distributions (Hübotter et al., arXiv:2601.20802). The teacher is a moving average of the
// policy's weights, with another right answer to the problem in its prompt. The loss uses no rewards: grades
// only decide which answers are right. The numbers are those of the authors' code. Their loss is a
// mean over the answers with a teacher, and this one over all answers: see `distribution_distillation`.
{
  credit: { type: 'none' },
  trainer+: {
    advantage_normalisation: 'none',
    skip_without_advantage: false,
    objective: {
      type: 'distribution_distillation',
      divergence: 'jsd',
      jsd_beta: 0.5,
      top_k: 100,
      tail: 'outcome',
      importance_cap: 2.0,
      teacher: { context: 'right_answer', weights: 'average', decay: 0.95 },
    },
  },
}
