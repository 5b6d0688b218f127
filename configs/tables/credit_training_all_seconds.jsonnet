// Learning in 12 seconds of training where eight choices must all be right, two runs at once, each on a core. The three
// comparisons, on the area under the curve over seconds, were declared before any of these seeds was run; rates and batches did best of
// three tries at equal tokens on another seed (credit_training_all_tries).
(import 'credit_training.libsonnet')(
  'all',
  std.range(611, 618),
  {
    ceiling: ['fast'],
    grpo: ['fast'],
    siblings: ['fast'],
    vineppo_1: ['fast'],
    vineppo_3: ['fast'],
  },
  'Credit in 12 seconds: eight choices must all be right',
  {
    name: 'credit_training_all_seconds',
    comparisons: [{ row: row, to: 'GRPO' } for row in ['siblings', 'VinePPO, K = 1', 'VinePPO, K = 3']],
    until: {
      difference: 0.05,
      assume: 'normal',
      column: 'area over seconds',
      seeds: { at_least: 3, at_most: 8 },
    },
  },
  directory='experiments/credit_training_all_seconds',
  tokens=120000,
  seconds=12,
)
