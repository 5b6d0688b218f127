// Further configurations of this folder, each under its name: configs/objectives/NAME.jsonnet is the field NAME.
{
  // More room upwards than downwards, so that rare tokens can become likely (DAPO, arXiv:2503.14476, eq. 10).
  clip_higher: { trainer+: { objective+: { clip_low: 0.2, clip_high: 0.28 } } },

  // A bound for tokens of negative advantage that have become much likelier (Ye et al., arXiv:1912.09729, eq. 5).
  dual_clip: { trainer+: { objective+: { dual_clip: 3.0 } } },

  // A little for staying undecided, over trained tokens only (the single-file GRPO on Countdown: 0.001).
  entropy_bonus: { trainer+: { objective+: { entropy_coef: 0.001 } } },

  // The opposite sign: the policy gets surer as it learns ("Exploring Paths", section 4.2).
  entropy_penalty: { trainer+: { objective+: { entropy_coef: -0.1 } } },

  // Holds the mean entropy near 0.2 nats: the coefficient rises while there is less, and never falls below 0.
  entropy_target: { trainer+: { entropy_target: { target: 0.2, rate: 1e-3, lowest: 0.0, highest: 0.05 } } },

  // Truncated importance sampling: the engine samples from slightly other probabilities than the trainer
  // computes, and the quotient, at most 2, weighs each token (Yao et al. 2025).
  importance_cap_2: { trainer+: { objective+: { importance_cap: 2.0 } } },

  // IcePop: the same quotient weighs each token, and those where it lies outside have no policy term
  // (Ring-1T, arXiv:2510.18855; INTELLECT-3, arXiv:2512.16144, eq. 1).
  icepop: { trainer+: { objective+: { importance_cap: null, importance_band: [0.5, 5.0] } } },

  // KL to the start model taken from each token's own advantage, k1, after normalisation. The coefficient is to
  // be tuned.
  kl_in_advantage: {
    trainer+: {
      objective+: {
        kl_coef: 0.01,
        kl_estimator: 'k1',
        kl_placement: 'advantage',
        kl_clamp: null,  // these two are of a KL in the loss
        kl_reduction: 'token_mean',
      },
    },
  },

  // KL to the start model in the loss, k3 (GRPO, arXiv:2402.03300, eq. 4; its coefficient).
  kl_in_loss: { trainer+: { objective+: { kl_coef: 0.04, kl_estimator: 'k3', kl_placement: 'loss' } } },

  // KL to the start model taken from each token's reward, k1: a token answers for what follows it
  // (Ouyang et al., arXiv:2203.02155; REINFORCE++, Hu et al., arXiv:2501.03262). The coefficient is to be tuned.
  kl_in_reward: {
    trainer+: {
      objective+: {
        kl_coef: 0.01,
        kl_estimator: 'k1',
        kl_placement: 'reward',
        kl_clamp: null,  // these two are of a KL in the loss
        kl_reduction: 'token_mean',
      },
    },
  },

  // The KL as a mean over tokens, as the policy term: its weight doesn't grow with the length of answers.
  // A coefficient that was chosen for the sum over an answer is smaller here by that length.
  kl_token_mean: { trainer+: { objective+: { kl_reduction: 'token_mean' } } },

  // No loss where a minibatch's mean ratio to the old policy is above 10: a guard that the VinePPO paper's runs have.
  ratio_threshold_10: { trainer+: { objective+: { ratio_threshold: 10 } } },

  // Every answer weighs the same, however long (GRPO, Shao et al., arXiv:2402.03300, eq. 3).
  sequence_mean: { trainer+: { objective+: { aggregation: 'sequence', constant_length: null } } },

  // No step where no group of the minibatch has spread: momentum and weight decay would move the weights.
  skip_without_advantage: { trainer+: { skip_without_advantage: true } },

  // SPO 3.3 the other way: only unlikely tokens of correct answers are lifted, confident ones are left alone.
  spo_mask_below: { trainer+: { objective+: { mask: 'below' } } },

  // Every token weighs the same, so long answers weigh more (DAPO, arXiv:2503.14476, eq. 12).
  token_mean: { trainer+: { objective+: { aggregation: 'token', constant_length: null } } },
}
