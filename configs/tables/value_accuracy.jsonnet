// The VinePPO paper's value quality: PPO's critic and Monte-Carlo values against 256 continuations (MATH).
local paper = import 'vineppo_paper.libsonnet';
local source = 'Kazemnejad et al., arXiv:2410.01679v2';
local analyzer = ['configs/analyzers/value_accuracy.jsonnet'];
local measures = { mean_absolute_error: 'mean absolute error', accuracy: 'share on the right side of 0.5' };
local column(model, measure) = '%s: %s' % [paper.column(model, 'MATH'), measures[measure]];
local published = {
  deepseek: { mean_absolute_error: { critic: 0.11, monte_carlo_9: 0.03 }, accuracy: {} },
  rho: { mean_absolute_error: {}, accuracy: {} },
};
local row(name, method, estimator) = {
  name: name,
  cells: {
    [column(model, measure)]: {
      experiment: paper.experiment(model, 'MATH', method),
      value: 'numbers.all.estimators.%s.within.%s' % [estimator, measure],
    } + if estimator in published[model][measure] then {
      published: published[model][measure][estimator],
      source: source,
    } else {}
    for model in ['rho', 'deepseek']
    for measure in std.objectFields(measures)
  },
};
paper.table {
  name: 'value_accuracy',
  title: 'VinePPO: how near the values come to the truth',
  baseline: "PPO's critic",
  experiments: paper.experiments('rho', 'MATH', ['ppo', 'vineppo'], analyzer)
               + paper.experiments('deepseek', 'MATH', ['ppo', 'vineppo'], analyzer),
  columns: [
    {
      name: column(model, measure),
      analysis: 'value_accuracy',
      percent: measure == 'accuracy',
      better: if measure == 'accuracy' then 'higher' else 'lower',
    }
    for model in ['rho', 'deepseek']
    for measure in ['mean_absolute_error', 'accuracy']
  ],
  rows: [
    row("PPO's critic", 'ppo', 'critic'),
    row('Monte Carlo, K = 1', 'vineppo', 'monte_carlo_1'),
    row('Monte Carlo, K = 3', 'vineppo', 'monte_carlo_3'),
    row('Monte Carlo, K = 9', 'vineppo', 'monte_carlo_9'),
  ],
  notes: ['States between the steps of answers; the truth is the mean of 256 continuations that no estimate shares.'],
}
