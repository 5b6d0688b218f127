// Learning in 42 seconds of training where the first of 32 choices decides, two runs at once, each on a core. The three
// comparisons, on the area under the curve over seconds, and where it ends were declared before any of these seeds was run; tokens and
// seconds are from tries on seeds 201 and 202. All 24 seeds were run, although the table could have ended at the first look at which
// all three differed.
(import 'credit_training.libsonnet')(
  'long',
  std.range(301, 324),
  {
    ceiling: ['fast'],
    grpo: ['oftener'],
    siblings: ['oftener'],
    vineppo_1: ['oftener'],
    vineppo_3: ['oftener'],
  },
  'Credit in 42 seconds: the first of 32 choices decides',
  {
    name: 'credit_training_seconds',
    comparisons: [{ row: row, to: 'GRPO' } for row in ['siblings', 'VinePPO, K = 1', 'VinePPO, K = 3']],
    until: {
      difference: 0.02,
      assume: 'normal',
      column: 'area over seconds',
      stop_losers: true,
      seeds: { at_least: 6, at_most: 24 },
    },
  },
  tokens=500000,
  directory='experiments/credit_training_seconds',
  seconds=42,
)
