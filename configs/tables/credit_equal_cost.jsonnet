// Which credit is worth its tokens: all methods start from one model and sample as many tokens, for answers and for their
// credit together. Those that step once an iteration have eight problems with eight answers in it: where credit costs more, they
// have fewer iterations. Seeds are those of reinforcement learning.
local task = 'distraction';
{
  local from_start(name, every, fragments=[], more='{}') = {
    configs: ['configs/equal_cost/%s.jsonnet' % task] + ['configs/%s.jsonnet' % one for one in fragments],
    overrides: [
      '{ model+: { name_or_path: "%s/shared/equal_cost/%s_start/checkpoints/last/policy" } }' % [$.directory, task],
      '{ experiment_name+: "/%s", evaluation+: { every: %d } } + %s' % [name, every, more],
    ],
    needs: ['start'],
    seconds_per_run: 90,
    estimated_from: 'a guess for one of two cores',
  },
  local monte_carlo(name, every, samples, values='continuations') =
    from_start(name, every, ['methods/vineppo'], '{ credit+: { samples: %d, values: { type: "%s" } } }' % [samples, values]),

  type: 'reproduction',
  name: 'credit_equal_cost',
  title: 'Credit at equal cost: 120,000 sampled tokens each, from one start model',
  directory: 'experiments/credit_equal_cost',
  seeds: std.range(1, 16),
  baseline: 'GRPO',
  pairs: [
    { row: 'siblings, topped up to 3', to: 'VinePPO, K = 9' },
    { row: 'siblings, topped up to 3', to: 'VinePPO, K = 3' },
  ],
  // Runs of one row may end anywhere between nothing and everything right: what 16 seeds can know of that is little.
  until: {
    difference: 0.3,
    rows: ['VinePPO, K = 9', 'siblings, topped up to 3'],
    seeds: { at_least: 8, at_most: 16 },
  },
  experiments: {
    start: {
      configs: ['configs/equal_cost/%s_start.jsonnet' % task],
      shared: true,
      seconds_per_run: 200,
      estimated_from: 'a guess for one of two cores',
    },
    restem: from_start('restem', 1, ['methods/restem', 'overlays/equal_cost_filtered']),
    dpo_positive: from_start('dpo_positive', 1, ['methods/dpo_positive', 'overlays/equal_cost_preferences']),
    ppo: from_start('ppo', 8, ['methods/ppo'], '{ credit+: { critic+: { learning_rate: 1e-3 } } }'),
    grpo: from_start('grpo', 8),
    dr_grpo: from_start('dr_grpo', 8, ['presets/dr_grpo']),
    rloo: from_start('rloo', 8, ['methods/ppo_rloo_credit']),
    vineppo_1: monte_carlo('vineppo_1', 5, 1),
    vineppo_3: monte_carlo('vineppo_3', 3, 3),
    vineppo_9: monte_carlo('vineppo_9', 2, 9),
    topped_up_3: monte_carlo('topped_up_3', 6, 3, 'topped_up'),
    tree: from_start('tree', 4, ['overlays/equal_cost_tree']),
  },
  columns: [
    { name: 'test pass@1', evaluation: 'test', curve: 'validation' },
    { name: 'area under the curve', area: { over: 'tokens', upto: 120000 }, curve: 'validation' },
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
    { name: 'siblings, topped up to 3', experiment: 'topped_up_3' },
    { name: 'tree, two ways', experiment: 'tree' },
  ],
  notes: [
    'Answers to held-out problems are sampled as in training (temperature 1).',
    'All have one learning rate; credit_equal_cost_rates tries three of them with GRPO and VinePPO.',
    'RestEM and DPO-positive choose among epochs on validation; its answers are not among the budget.',
  ],
}
