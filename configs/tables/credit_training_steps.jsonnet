// Learning in 96 steps of the optimizer where the first of 16 choices decides, whatever a method samples for them. The three
// comparisons, on the area under the curve over steps, were declared before any of these seeds was run; rates and batches are those
// of credit_training_first, which were chosen at equal tokens, with 16 answers a step for all.
(import 'credit_training.libsonnet')(
  'first',
  std.range(401, 408),
  {
    ceiling: ['oftener'],
    grpo: ['oftener'],
    siblings: ['oftener'],
    vineppo_1: ['oftener'],
    vineppo_3: ['oftener'],
  },
  'Credit in 96 optimizer steps: the first of 16 choices decides',
  {
    name: 'credit_training_steps',
    comparisons: [{ row: row, to: 'GRPO' } for row in ['siblings', 'VinePPO, K = 1', 'VinePPO, K = 3']],
    until: {
      difference: 0.05,
      assume: 'normal',
      column: 'area over steps',
      seeds: { at_least: 3, at_most: 8 },
    },
  },
  directory='experiments/credit_training_steps',
  steps=96,
)
