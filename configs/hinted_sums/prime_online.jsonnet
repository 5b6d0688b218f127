// PRIME: the reward model starts as the start model, and learns the outcomes of each iteration's answers.
(import '../lib/hinted_sums.libsonnet').policy_gradient('prime_online', (import '../methods/prime_online.jsonnet') + {
  credit+: { reward_model+: { learning_rate: 1e-4 } },
})
