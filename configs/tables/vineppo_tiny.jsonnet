// The VinePPO paper's efficiency and its ablation of K, on an embedded task with a tiny model: what methods come to, and
// what they need to be as good as PPO at its best, in gradient steps, sampled tokens and seconds.
local tiny = import 'figures_tiny.libsonnet';
local words = { steps: 'gradient steps', tokens: 'sampled tokens', seconds: 'time' };
local methods = ['ppo', 'grpo', 'vineppo_1', 'vineppo_3', 'vineppo_9'];
tiny.table {
  name: 'vineppo_tiny',
  title: 'Accuracy against steps, tokens and time, and continuations per state: a tiny model',
  baseline: 'PPO',
  experiments: tiny.experiments(methods),
  columns: [{ name: 'test pass@1', evaluation: 'test', curve: 'validation' }] + [
    {
      name: 'times less %s than PPO' % words[over],
      speedup: { of: 'PPO', over: over },
      curve: 'validation',
      percent: false,
      unit: '×',
    }
    for over in std.objectFields(words)
  ],
  rows: [{ name: tiny.methods[method].name, experiment: method } for method in methods],
  notes: [
    'Times less: of what the row needs on validation until it is as good as PPO is at its best.',
    'All begin with the weights of SFT on the same seed.',
  ],
}
