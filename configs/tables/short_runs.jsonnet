// Short runs of methods, to see that they train: 24 iterations of 16 problems with eight answers each, on sums.
local on_sums(name, needs=[]) = {
  configs: ['configs/hinted_sums/%s.jsonnet' % name],
  needs: ['start'] + needs,
  seconds_per_run: 40,
  estimated_from: 'a guess for one of two cores',
};
local shared(name, needs=[]) = {
  configs: ['configs/hinted_sums/%s.jsonnet' % name],
  needs: needs,
  shared: true,
  seconds_per_run: 120,
  estimated_from: 'a guess for one of two cores',
};
{
  type: 'reproduction',
  name: 'short_runs',
  title: 'Short runs of methods on sums',
  // The start model of the sums is that of self_distillation.jsonnet.
  directory: 'experiments/self_distillation',
  seeds: [1],
  experiments: {
    start: shared('start'),
    reward_model: shared('reward_model', ['start']),
    grpo: on_sums('grpo'),
    ppo: on_sums('ppo'),
    ppo_hl_gauss: on_sums('ppo_hl_gauss'),
    ppo_privileged: on_sums('ppo_privileged'),
    prime: on_sums('prime', ['reward_model']),
    prime_online: on_sums('prime_online'),
    resets: on_sums('resets'),
    tree_last_states: on_sums('tree_last_states'),
    lambda_returns: on_sums('lambda_returns'),
  },
  columns: [{ name: 'test pass@1', evaluation: 'test', curve: 'validation' }],
  rows: [
    { name: 'start', experiment: 'start' },
    { name: 'DPO, the reward model', experiment: 'reward_model' },
    { name: 'GRPO', experiment: 'grpo' },
    { name: 'PPO, squared error', experiment: 'ppo' },
    { name: 'PPO, HL-Gauss', experiment: 'ppo_hl_gauss' },
    { name: 'PPO, critic sees the answer', experiment: 'ppo_privileged' },
    { name: 'PRIME, reward model fixed', experiment: 'prime' },
    { name: 'PRIME, reward model learns', experiment: 'prime_online' },
    { name: 'RRPO', experiment: 'resets' },
    { name: 'tree, branches at the last line', experiment: 'tree_last_states' },
    { name: 'continuations with lam = 1', experiment: 'lambda_returns' },
  ],
}
