// Learning in 48 steps of the optimizer where eight choices must all be right, whatever a method samples for them. The three
// comparisons, on the area under the curve over steps, were declared before any of these seeds was run; rates and batches did best of
// three tries at equal tokens on another seed (credit_training_all_tries). A step has 32 answers for all.
(import 'credit_training.libsonnet')(
  'all',
  std.range(621, 628),
  {
    ceiling: ['fast'],
    grpo: ['fast'],
    siblings: ['fast'],
    vineppo_1: ['fast'],
    vineppo_3: ['fast'],
  },
  'Credit in 48 optimizer steps: eight choices must all be right',
  {
    name: 'credit_training_all_steps',
    comparisons: [{ row: row, to: 'GRPO' } for row in ['siblings', 'VinePPO, K = 1', 'VinePPO, K = 3']],
    until: {
      difference: 0.05,
      assume: 'normal',
      column: 'area over steps',
      seeds: { at_least: 3, at_most: 8 },
    },
  },
  directory='experiments/credit_training_all_steps',
  steps=48,
)
