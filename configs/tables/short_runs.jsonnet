// Short runs of methods, to see that they train: 24 iterations of 128 answers on sums, 15 of 128 on products with threads.
local on_sums(name, needs=[]) = {
  configs: ['configs/hinted_sums/%s.jsonnet' % name],
  needs: ['start'] + needs,
  seconds_per_run: 40,
  estimated_from: 'a guess for one of two cores',
};
local with_threads(name) = {
  configs: ['configs/threadweaver/tiny/%s.jsonnet' % name],
  needs: ['short_start'],
  seconds_per_run: 60,
  estimated_from: 'a guess for one of two cores',
};
local shared(folder, name, needs=[]) = {
  configs: ['configs/%s/%s.jsonnet' % [folder, name]],
  needs: needs,
  shared: true,
  seconds_per_run: 120,
  estimated_from: 'a guess for one of two cores',
};
{
  type: 'reproduction',
  name: 'short_runs',
  title: 'Short runs of methods on tiny tasks',
  // The start model of the sums is that of self_distillation.jsonnet.
  directory: 'experiments/self_distillation',
  seeds: [1, 2, 3],
  experiments: {
    start: shared('hinted_sums', 'start'),
    reward_model: shared('hinted_sums', 'reward_model', ['start']),
    grpo: on_sums('grpo'),
    ppo: on_sums('ppo'),
    ppo_hl_gauss: on_sums('ppo_hl_gauss'),
    ppo_privileged: on_sums('ppo_privileged'),
    prime: on_sums('prime', ['reward_model']),
    resets: on_sums('resets'),
    short_start: shared('threadweaver/tiny', 'short_start'),
    short_rloo: with_threads('short_rloo'),
    short_shapley: with_threads('short_shapley'),
  },
  columns: [{ name: 'test pass@1', evaluation: 'test', curve: 'validation' }],
  rows: [
    { name: 'start, sums', experiment: 'start' },
    { name: 'DPO, the reward model', experiment: 'reward_model' },
    { name: 'GRPO', experiment: 'grpo' },
    { name: 'PPO, squared error', experiment: 'ppo' },
    { name: 'PPO, HL-Gauss', experiment: 'ppo_hl_gauss' },
    { name: 'PPO, critic sees the answer', experiment: 'ppo_privileged' },
    { name: 'PRIME, reward model fixed', experiment: 'prime' },
    { name: 'RRPO', experiment: 'resets' },
    { name: 'start, threads', experiment: 'short_start' },
    { name: 'RLOO, threads', experiment: 'short_rloo' },
    { name: 'Shapley values, threads', experiment: 'short_shapley' },
  ],
}
