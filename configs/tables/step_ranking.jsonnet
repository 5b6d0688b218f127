// The VinePPO paper's ranking of steps: of five next steps from one state, is the better known? PPO's critic and
// Monte-Carlo values against 256 continuations (MATH).
local paper = import 'vineppo_paper.libsonnet';
local analyzer = ['configs/analyzers/action_ranking.jsonnet'];
local measures = { pairwise: 'pairs in the right order', best: 'the best step found' };
local column(model, measure) = '%s: %s' % [paper.column(model, 'MATH'), measures[measure]];
local row(name, method, estimator) = {
  name: name,
  cells: {
    [column(model, measure)]: {
      experiment: paper.experiment(model, 'MATH', method),
      value: 'numbers.all.estimators.%s.%s' % [estimator, measure],
    }
    for model in ['rho', 'deepseek']
    for measure in std.objectFields(measures)
  },
};
paper.table {
  name: 'step_ranking',
  title: 'VinePPO: whether values know the better next step',
  baseline: "PPO's critic",
  experiments: paper.experiments('rho', 'MATH', ['ppo', 'vineppo'], analyzer)
               + paper.experiments('deepseek', 'MATH', ['ppo', 'vineppo'], analyzer),
  columns: [
    { name: column(model, measure), analysis: 'action_ranking' }
    for model in ['rho', 'deepseek']
    for measure in ['pairwise', 'best']
  ],
  rows: [
    row("PPO's critic", 'ppo', 'critic'),
    row('Monte Carlo, K = 1', 'vineppo', 'monte_carlo_1'),
    row('Monte Carlo, K = 3', 'vineppo', 'monte_carlo_3'),
    row('Monte Carlo, K = 9', 'vineppo', 'monte_carlo_9'),
  ],
  notes: ['Chance is 50 % of the pairs, and the best of five at about one in five; the truth is the mean of 256 continuations.'],
}
