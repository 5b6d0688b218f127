// Learning in 72 seconds of training where the first of 48 choices decides, two runs at once, each on a core. The three
// comparisons, on the area under the curve over seconds, and where it ends were declared before any of these seeds was run; tokens and
// seconds are from tries on seed 201. With 24 seeds at most, it ended after 14, at the first look at which all three differed. A confidence
// sequence allows such looks.
(import 'credit_training.libsonnet')(
  'longest',
  std.range(301, 314),
  {
    ceiling: ['fast'],
    grpo: ['oftener'],
    siblings: ['oftener'],
    vineppo_1: ['oftener'],
    vineppo_3: ['oftener'],
  },
  'Credit in 72 seconds: the first of 48 choices decides',
  {
    name: 'credit_training_seconds_longest',
    comparisons: [{ row: row, to: 'GRPO' } for row in ['siblings', 'VinePPO, K = 1', 'VinePPO, K = 3']],
    until: {
      difference: 0.02,
      assume: 'normal',
      column: 'area over seconds',
      stop_losers: true,
      seeds: { at_least: 5, at_most: 14 },
    },
  },
  tokens=750000,
  directory='experiments/credit_training_seconds_longest',
  seconds=72,
)
