// OPSD on whole distributions (Zhao et al., arXiv:2601.18734): at each token of its own answers, the policy learns the
// distribution of the start model with the reference answer in its prompt. Rewards don't count. The divergence and the bound
// are those of the authors' script.
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
