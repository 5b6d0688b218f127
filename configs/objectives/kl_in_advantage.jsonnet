// KL to the start model taken from each token's own advantage, k1, after normalisation. The coefficient is to
// be tuned.
{
  trainer+: {
    objective+: {
      kl_coef: 0.01,
      kl_estimator: 'k1',
      kl_placement: 'advantage',
      kl_clamp: null,  // these two are of a KL in the loss
      kl_reduction: 'token_mean',
    },
  },
}
