// One H100 and ten hours: what a credit gains on Rho-1B and GSM8K, and whether it is what is learnt. The first hour is one run
// of GRPO, at whose start, middle and end eleven credits are scored on 512 answers: that predicts the winner. Then four methods
// with five seeds, each for 4.4 million sampled tokens. Not yet run; `reproduce_table --plan` says what it would cost.
local setting = 'configs/polIter_rho1bSft2_grpo_GSM8K.jsonnet';
local credits = {
  grpo: { name: 'GRPO', bench: 'GRPO', configs: [], seconds: 1500 },
  topped_up_1: { name: 'siblings, topped up to 1', bench: 'siblings, topped up to 1', configs: ['configs/credit/topped_up_1.jsonnet'], seconds: 900 },
  vineppo_3: { name: 'VinePPO, K = 3', bench: 'VinePPO K=3', configs: ['configs/credit/continuations_3.jsonnet'], seconds: 600 },
  tree: { name: 'tree, branches where unsure', bench: null, configs: ['configs/rollouts/tree_unsure.jsonnet', 'configs/credit/tree.jsonnet'], seconds: 1500 },
};
local order = ['grpo', 'topped_up_1', 'vineppo_3', 'tree'];
local measured_at = ['0', '30', '60'];
local gain(point) = { name: 'gain per token, after %s' % point, analysis: 'credit_worth', percent: false, digits: 2 };
local checkpoints = '{ checkpoints+: { every: 30, keep_every: 30 }, experiment_name: "credit_h100/probe", iterations: 60,'
                    + ' analyzers: [one { checkpoints: [0, 30, 60] } for one in super.analyzers] }';
{
  type: 'reproduction',
  name: 'credit_h100',
  title: 'Which credit is worth its tokens: Rho-1B on GSM8K, one H100',
  directory: 'experiments/credit_h100',
  seeds: [1, 2, 3, 4, 5],
  baseline: 'GRPO',
  comparisons: [{ row: credits[method].name, to: 'GRPO' } for method in order if method != 'grpo'],
  until: {
    difference: 0.02,
    assume: 'normal',
    stop_losers: true,
    column: 'gsm8k_test',
    seeds: { at_least: 4, at_most: 5 },
  },
  experiments: {
    probe: {
      configs: [setting, 'configs/analyzers/credit_worth.jsonnet'],
      overrides: [checkpoints],
      shared: true,
      seconds_per_run: 3000,
      estimated_from: 'plan: 21 s an iteration, and the analysis',
    },
  } + {
    [method]: {
      configs: [setting] + credits[method].configs,
      overrides: [
        '{ experiment_name: "credit_h100/%s", iterations: 80, stop_after: { sampled_tokens: 4400000 },' % method
        + ' trainer+: { schedule: { type: "warmup", steps: 30 } }, evaluation+: { every: null }, checkpoints+: { every: 40, keep_every: null } }',
      ],
      needs: ['probe'],
      seconds_per_run: credits[method].seconds,
      estimated_from: 'plan, with answers of 120 tokens',
    }
    for method in order
  },
  columns: [{ name: 'gsm8k_test', evaluation: 'gsm8k_test' }] + [gain(point) for point in measured_at],
  rows: [
    {
      name: credits[method].name,
      cells: { gsm8k_test: { experiment: method } } + {
        [gain(point).name]: {
          experiment: 'probe',
          value: 'numbers.by_checkpoint.%s.methods.%s.gain_per_token.value' % [point, credits[method].bench],
        }
        for point in measured_at
        if credits[method].bench != null
      },
    }
    for method in order
  ],
}
