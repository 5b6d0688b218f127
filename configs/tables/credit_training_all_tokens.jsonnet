// Learning at 60,000 sampled tokens where eight choices must all be right. The three
// comparisons, on the area under the curve over tokens, were declared before any of these seeds was run; rates and batches did best of
// three tries at equal tokens on another seed (credit_training_all_tries).
(import 'credit_training.libsonnet')(
  'all',
  std.range(601, 608),
  {
    ceiling: ['fast'],
    grpo: ['fast'],
    siblings: ['fast'],
    vineppo_1: ['fast'],
    vineppo_3: ['fast'],
  },
  'Credit at 60,000 sampled tokens: eight choices must all be right',
  {
    name: 'credit_training_all_tokens',
    comparisons: [{ row: row, to: 'GRPO' } for row in ['siblings', 'VinePPO, K = 1', 'VinePPO, K = 3']],
    until: {
      difference: 0.05,
      assume: 'normal',
      column: 'area over tokens',
      seeds: { at_least: 3, at_most: 8 },
    },
  },
  directory='experiments/credit_training_all_tokens',
  tokens=60000,
)
