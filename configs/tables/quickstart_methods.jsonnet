// Seven methods on sums of four two-digit numbers, three seeds each. All but SFT train on 12,800
// sampled answers: policy gradients on 25 × 64 problems × 8, the others on as many in their own order.
local seen = 'seen on two cores', guessed = 'a guess for two cores';
local after_sft(name, seconds_per_iteration, estimated_from=guessed) = {
  configs: ['configs/quickstart/%s.jsonnet' % name],
  needs: ['sft'],
  seconds_per_iteration: seconds_per_iteration,
  estimated_from: estimated_from,
};
{
  type: 'reproduction',
  name: 'quickstart_methods',
  title: 'Seven methods on the embedded task, 12,800 sampled answers each',
  directory: 'experiments/quickstart_methods',
  seeds: [1, 2, 3],
  baseline: 'SFT',
  experiments: {
    sft: { configs: ['configs/quickstart/sft.jsonnet'], seconds_per_iteration: 25, estimated_from: seen },
    restem: after_sft('restem', 90),
    dpo_positive: after_sft('dpo_positive', 300),
    ppo: after_sft('ppo', 9),
    grpo: after_sft('grpo', 6),
    rloo: after_sft('rloo', 6),
    vineppo: after_sft('vineppo', 14, seen),
  },
  columns: [{ name: 'test pass@1', evaluation: 'test', curve: 'validation' }],
  rows: [
    { name: 'SFT', experiment: 'sft' },
    { name: 'RestEM', experiment: 'restem' },
    { name: 'DPO-positive', experiment: 'dpo_positive' },
    { name: 'PPO', experiment: 'ppo' },
    { name: 'GRPO', experiment: 'grpo' },
    { name: 'RLOO', experiment: 'rloo' },
    { name: 'VinePPO', experiment: 'vineppo' },
  ],
  notes: [
    'Methods start from the weights of SFT. Answers to held-out problems are sampled as in training (temperature 1).',
    'RestEM and DPO-positive choose among epochs on validation; its answers are not among the 12,800.',
  ],
}
