// Which credit is worth its tokens: all methods start from one model and sample as many tokens, for answers and for their
// credit together, in about as many iterations of one step. Seeds are those of reinforcement learning.
local task = 'slips';
{
  local from_start(name, fragments, problems, more='{}') = {
    configs: ['configs/equal_cost/%s.jsonnet' % task] + ['configs/%s.jsonnet' % one for one in fragments],
    overrides: [
      '{ model+: { name_or_path: "%s/shared/equal_cost/%s_start/checkpoints/last/policy" } }' % [$.directory, task],
      '{ experiment_name+: "/%s", problems_per_iteration: %d }' % [name, problems],
      more,
    ],
    needs: ['start'],
    seconds_per_run: 90,
    estimated_from: 'a guess for one of two cores',
  },
  local monte_carlo(name, samples, problems, more='{}') =
    from_start(name, ['methods/vineppo'], problems, '{ rollout+: { samples: 4 }, credit+: { samples: %d } } + %s' % [samples, more]),

  type: 'reproduction',
  name: 'credit_equal_cost',
  title: 'Credit at equal cost: 400,000 sampled tokens each, from one start model',
  directory: 'experiments/credit_equal_cost',
  seeds: std.range(1, 16),
  baseline: 'GRPO',
  pairs: [{ row: 'K = 3, smoothed', to: 'VinePPO, K = 9' }, { row: 'K = 3, smoothed', to: 'VinePPO, K = 3' }],
  until: { difference: 0.03, rows: ['VinePPO, K = 3', 'K = 3, smoothed'], seeds: { at_least: 8, at_most: 16 } },
  experiments: {
    start: {
      configs: ['configs/equal_cost/%s_start.jsonnet' % task],
      shared: true,
      seconds_per_run: 400,
      estimated_from: 'a guess for one of two cores',
    },
    restem: from_start('restem', ['methods/restem', 'equal_cost/filtered'], 270),
    dpo_positive: from_start('dpo_positive', ['methods/dpo_positive', 'equal_cost/preferences'], 169),
    ppo: from_start('ppo', ['methods/ppo'], 84, '{ credit+: { critic+: { learning_rate: 1e-3 } } }'),
    grpo: from_start('grpo', [], 84),
    dr_grpo: from_start('dr_grpo', ['presets/dr_grpo'], 84),
    rloo: from_start('rloo', ['methods/ppo_rloo_credit'], 84),
    vineppo_1: monte_carlo('vineppo_1', 1, 38),
    vineppo_3: monte_carlo('vineppo_3', 3, 15),
    vineppo_9: monte_carlo('vineppo_9', 9, 5),
    tree: from_start('tree', ['methods/tree'], 53),
    smoothed_3: monte_carlo('smoothed_3', 3, 15, '{ credit+: { values: { type: "smoothed" } } }'),
  },
  columns: [
    { name: 'test pass@1', evaluation: 'test', curve: 'validation' },
    { name: 'area under the curve', area: { over: 'tokens', upto: 400000 }, curve: 'validation' },
    { name: 'tokens to 50 %', reach: { accuracy: 0.5, over: 'tokens' }, curve: 'validation' },
  ],
  rows: [
    { name: 'SFT (the start)', experiment: 'start' },
    { name: 'RestEM', experiment: 'restem' },
    { name: 'DPO-positive', experiment: 'dpo_positive' },
    { name: 'PPO', experiment: 'ppo' },
    { name: 'GRPO', experiment: 'grpo' },
    { name: 'Dr. GRPO', experiment: 'dr_grpo' },
    { name: 'RLOO', experiment: 'rloo' },
    { name: 'VinePPO, K = 1', experiment: 'vineppo_1' },
    { name: 'VinePPO, K = 3', experiment: 'vineppo_3' },
    { name: 'VinePPO, K = 9', experiment: 'vineppo_9' },
    { name: 'K = 3, smoothed', experiment: 'smoothed_3' },
    { name: 'tree', experiment: 'tree' },
  ],
  notes: [
    'Answers to held-out problems are sampled as in training (temperature 1).',
    'RestEM and DPO-positive choose among epochs on validation; its answers are not among the budget.',
  ],
}
