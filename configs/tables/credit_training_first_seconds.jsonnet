// Learning in 20 seconds of training where the first of 16 choices decides, two runs at once, each on a core. The three
// comparisons, on the area under the curve over seconds, were declared before any of these seeds was run; rates and batches are those
// of credit_training_first. A method that ends its tokens before the 20 seconds keeps its last accuracy.
(import 'credit_training.libsonnet')(
  'first',
  std.range(501, 508),
  {
    ceiling: ['fast'],
    grpo: ['oftener'],
    siblings: ['oftener'],
    vineppo_1: ['oftener'],
    vineppo_3: ['oftener'],
  },
  'Credit in 20 seconds: the first of 16 choices decides',
  {
    name: 'credit_training_first_seconds',
    comparisons: [{ row: row, to: 'GRPO' } for row in ['siblings', 'VinePPO, K = 1', 'VinePPO, K = 3']],
    until: {
      difference: 0.05,
      assume: 'normal',
      column: 'area over seconds',
      seeds: { at_least: 3, at_most: 8 },
    },
  },
  tokens=240000,
  directory='experiments/credit_training_first_seconds',
  seconds=20,
)
