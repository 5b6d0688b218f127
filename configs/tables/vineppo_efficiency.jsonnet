// The VinePPO paper's efficiency: how much less it needs to be as good as PPO at its best, in gradient steps, in time
// and in sampled tokens; with it the curves of accuracy over all three.
local paper = import 'vineppo_paper.libsonnet';
local source = 'Kazemnejad et al., arXiv:2410.01679 (for Rho-1.1B as "up to")';
local published = { rho: { steps: 9.0, seconds: 3.0 }, deepseek: { steps: 2.8, seconds: 1.51 } };
local words = { steps: 'gradient steps', seconds: 'time', tokens: 'sampled tokens' };
local costs = std.objectFields(words);
local column(model, over) = '%s: times less %s' % [paper.column(model, 'MATH'), words[over]];
paper.table {
  name: 'vineppo_efficiency',
  title: "VinePPO: what it takes to be as good as PPO's best checkpoint",
  experiments: paper.experiments('rho', 'MATH', ['ppo', 'vineppo'])
               + paper.experiments('deepseek', 'MATH', ['ppo', 'vineppo']),
  columns: [
    {
      name: column(model, over),
      speedup: { of: 'PPO', over: over },
      curve: 'math_test',
      percent: false,
      unit: '×',
    }
    for model in ['rho', 'deepseek']
    for over in costs
  ],
  rows: [
    {
      name: paper.methods[method],
      cells: {
        [column(model, over)]: { experiment: paper.experiment(model, 'MATH', method) }
                               + if method == 'vineppo' && over in published[model] then { published: published[model][over], source: source } else {}
        for model in ['rho', 'deepseek']
        for over in costs
      },
    }
    for method in ['ppo', 'vineppo']
  ],
  notes: ['Read at the checkpoints that are kept; time on other machines is another time.'],
}
