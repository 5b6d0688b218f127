// KL to the start model taken from each token's reward, k1: a token answers for what follows it
// (Ouyang et al., arXiv:2203.02155; REINFORCE++, Hu et al., arXiv:2501.03262). The coefficient is to be tuned.
{
  trainer+: {
    objective+: {
      kl_coef: 0.01,
      kl_estimator: 'k1',
      kl_placement: 'reward',
      kl_clamp: null,  // these two are of a KL in the loss
      kl_reduction: 'token_mean',
    },
  },
}
