// OPSD on whole distributions (Zhao et al., arXiv:2601.18734). The policy writes an answer. At each of its
// tokens, the policy learns the distribution of a teacher: the start model, with the reference answer in its
// prompt. Rewards aren't used. The divergence and the bound of an entry are those of the authors' script.
{
  credit: { type: 'none' },
  trainer+: {
    advantage_normalisation: 'none',
    skip_without_advantage: false,
    objective: {
      type: 'distribution_distillation',
      divergence: 'forward_kl',
      entry_clip: 0.05,
      teacher: { context: 'gold', weights: 'reference' },
    },
  },
}
