// The VinePPO paper's value quality on an embedded task with a tiny model: PPO's critic and Monte-Carlo values against
// 256 continuations, their errors and whether they know the better next step.
local tiny = import 'figures_tiny.libsonnet';
local analyzers = ['configs/analyzers/value_accuracy.jsonnet', 'configs/analyzers/action_ranking.jsonnet'];
local columns = {
  'mean absolute error': { analysis: 'value_accuracy', value: 'within.mean_absolute_error', percent: false, digits: 3, better: 'lower' },
  'on the right side of 0.5': { analysis: 'value_accuracy', value: 'within.accuracy' },
  'pairs of steps in the right order': { analysis: 'action_ranking', value: 'pairwise' },
  'best step found': { analysis: 'action_ranking', value: 'best' },
};
local row(name, experiment, estimator) = {
  name: name,
  cells: {
    [column]: { experiment: experiment, value: 'numbers.all.estimators.%s.%s' % [estimator, columns[column].value] }
    for column in std.objectFields(columns)
  },
};
tiny.table {
  name: 'values_tiny',
  title: 'How near values come to the truth, and whether they know the better step: a tiny model',
  baseline: "PPO's critic",
  experiments: tiny.experiments(['ppo', 'vineppo_9'], analyzers),
  columns: [{ name: column } + columns[column] + { value:: null } for column in std.objectFields(columns)],
  rows: [
    row("PPO's critic", 'ppo', 'critic'),
    row('Monte Carlo, K = 1', 'vineppo_9', 'monte_carlo_1'),
    row('Monte Carlo, K = 3', 'vineppo_9', 'monte_carlo_3'),
    row('Monte Carlo, K = 9', 'vineppo_9', 'monte_carlo_9'),
  ],
  notes: [
    'The truth is the mean of 256 continuations that no estimate shares. States between the steps of answers of the last'
    + ' checkpoint; of up to five next steps from a state, those that are different.',
  ],
}
