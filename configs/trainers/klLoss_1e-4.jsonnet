// The VinePPO paper's KL to the start model: in the loss, k3, a token's clamped to [0, 10]. It is the sum
// over an answer's tokens, beside a policy term that is their mean: the coefficient was chosen for that.
{
  trainer+: {
    objective+: {
      kl_coef: 1e-4,
      kl_placement: 'loss',
      kl_estimator: 'k3',
      kl_clamp: [0, 10],
      kl_reduction: 'sequence_sum',
    },
  },
}
