// Credits of the literature, of which docs/methods/credits_of_the_literature.md says what they are: each is
// configs/credit/NAME.jsonnet, and stands in a bench's `methods` as (import 'credit/literature.libsonnet').NAME.credit.
{
  // A baseline for each position of a group, from answers weighted by the energy of their paths.
  optimal_token_baseline: { credit: { type: 'optimal_token_baseline' } },

  // RLOO's baseline, shrunk towards what the iteration's other problems earn: unbiased.
  james_stein: { credit: { type: 'james_stein' } },

  // A baseline between the group's mean and what a critic says of the prompt.
  v0_5: { credit: { type: 'v0_5' } },

  // GRPO in which a beginning that many answers share counts once.
  lambda_grpo: { credit: { type: 'lambda_grpo' } },

  // GRPO and, where answers part, the change of their mean reward.
  tempo: { credit: { type: 'tempo' } },

  // Values of common beginnings, drawn towards the group's mean.
  rtmc: { credit: { type: 'monte_carlo', samples: 1, values: { type: 'rtmc' } } },

  // Continuations before every fifth token that the policy was unsure of; likelier tokens are not trained.
  spo_chain: {
    credit: {
      type: 'probability_mask',
      below: 0.9,
      over: { type: 'monte_carlo', samples: 9, states: { type: 'low_probability', begin_with: true } },
    },
  },

  // Three continuations of each state, its value mixed with the next one's: unbiased.
  com_mcs: { credit: { type: 'monte_carlo', samples: 3, values: { type: 'com_mcs' } } },

  // GRPO's advantages at the fifth of the tokens with the highest entropy: for benches, no run knows entropies.
  forking_tokens: { credit: { type: 'forking_tokens', over: { type: 'group' } } },

  // An answer in its group, and each turn among all that followed the same words of an environment.
  gigpo: { credit: { type: 'gigpo' } },

  // GRPO's advantages, higher at tokens that plan: the paper's examples of such phrases.
  hicra: {
    credit: {
      type: 'hicra',
      over: { type: 'group' },
      phrases: ['we can use the fact that', "let's try a different approach", 'but the problem mentions that'],
    },
  },

  // A critic that learns rewards, and a policy with λ = 1 − 1/(0.05 l); the other with λ = 0.95.
  vapo: { credit: { type: 'vapo' } },
  vc_ppo: { credit: { type: 'vapo', alpha: null, lam: 0.95 } },
}
