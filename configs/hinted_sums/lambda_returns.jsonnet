// VinePPO's values with lam = 1, as in C3's replay: a line is worth the reward of the answer minus the value of the state before it.
(import '../lib/hinted_sums.libsonnet').policy_gradient('lambda_returns', {
  credit: { type: 'monte_carlo', samples: 3, lam: 1.0 },
})
