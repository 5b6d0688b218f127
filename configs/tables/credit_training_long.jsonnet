// Learning at 150,000 sampled tokens where the first of 32 choices decides. The three comparisons were declared before any
// of these seeds was run, on the area under the curve; rates and batches are those that did best on another seed (credit_training_tries).
(import 'credit_training.libsonnet')(
  'long',
  std.range(1, 16),
  {
    ceiling: ['fast'],
    grpo: ['oftener'],
    siblings: ['oftener'],
    vineppo_1: ['oftener'],
    vineppo_3: ['oftener'],
    tree: ['oftener'],
  },
  'Credit at 150,000 sampled tokens: the first of 32 choices decides',
  {
    name: 'credit_training_long',
    comparisons: [{ row: row, to: 'GRPO' } for row in ['siblings', 'VinePPO, K = 1', 'VinePPO, K = 3']],
    until: {
      difference: 0.02,
      assume: 'normal',
      column: 'area over tokens',
      seeds: { at_least: 6, at_most: 16 },
    },
  },
)
