// Learning at 300,000 sampled tokens where the first of 32 choices decides: twice as long as credit_training_long, whose
// siblings could not be ranked. The three comparisons were declared before any of these runs, with sixteen seeds
// at most. As siblings had ± 11 after fourteen, the limit was raised to 32. The table ended after 22, at the first look at which
// all three differed. A confidence sequence allows both.
(import 'credit_training.libsonnet')(
  'long',
  std.range(1, 22),
  {
    ceiling: ['fast'],
    grpo: ['oftener'],
    siblings: ['oftener'],
    vineppo_1: ['oftener'],
    vineppo_3: ['oftener'],
  },
  'Credit at 300,000 sampled tokens: the first of 32 choices decides',
  {
    name: 'credit_training_longer',
    comparisons: [{ row: row, to: 'GRPO' } for row in ['siblings', 'VinePPO, K = 1', 'VinePPO, K = 3']],
    until: {
      difference: 0.02,
      assume: 'normal',
      column: 'area over tokens',
      seeds: { at_least: 6, at_most: 22 },
    },
  },
  tokens=300000,
  directory='experiments/credit_training_longer',
)
