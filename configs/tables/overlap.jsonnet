// What answers that are one version old cost in learning, with a model that learns within a minute: tiny, from random weights,
// rewarded for answers that don't end before their limit. GRPO with iterations one after the other and overlapping by one
// step; both weigh tokens by truncated importance, so that the overlap is all that differs.
local run(name, fragment) = {
  configs: ['configs/quickstart/grpo.jsonnet', 'configs/' + fragment],
  overrides: [|||
    {
      experiment_name: 'overlap/%s',
      model: { type: 'tiny', layers: 1, hidden_size: 64, heads: 2, intermediate_size: 96, context_length: 64 },
      context_length: 64,
      rollout+: { max_tokens: 24, unfinished_reward: 1.0 },
      iterations: 16,
      problems_per_iteration: 16,
      trainer+: { learning_rate: 1e-3 },
      checkpoints: { every: 16 },
      evaluation: { every: 4, sets: [{ split: 'test', problems: 64, samples: 4, while_training: true }] },
      diagnostics: { limit_share: null, unfinished_ceiling: null, mixed_floor: null },
    }
  ||| % name],
  seconds_per_run: 90,
  estimated_from: 'a guess for two cores',
};
{
  type: 'reproduction',
  name: 'overlap',
  title: 'Learning with an overlap of one step, compared with iterations one after the other',
  directory: 'experiments/overlap',
  seeds: [1, 2, 3],
  baseline: 'one after the other',
  experiments: {
    none: run('none', 'objectives/importance_cap_2.jsonnet'),
    one_step: run('one_step', 'runtimes/one_step_overlap.jsonnet'),
  },
  columns: [{ name: 'share of answers that earn the reward', evaluation: 'test', curve: 'test' }],
  rows: [{ name: 'one after the other', experiment: 'none' }, { name: 'one step', experiment: 'one_step' }],
  panels: [
    { name: 'reward of sampled answers', metric: 'episodes/reward' },
    { name: 'KL to the start', metric: 'train/kl' },
  ],
  notes: ['Both objectives have importance_cap 2. 16 problems with 8 answers an iteration, one step on them.'],
}
