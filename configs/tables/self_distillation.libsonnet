// A table of methods on hinted sums. A row: {name, config}, the title and the file below configs/hinted_sums; in tries also
// `label`, which the experiment's name ends with, and `settings`, which are appended to the file.
local experiment_of(row) = row.config + (if std.objectHas(row, 'label') then '_' + row.label else '');
local experiment(row, start) = {
  configs: ['configs/hinted_sums/%s.jsonnet' % row.config],
  overrides: if std.objectHas(row, 'label') then ['{ experiment_name+: "_%s" }' % row.label, row.settings] else [],
  needs: [start],
  seconds_per_run: 40,
  estimated_from: 'seen on one of two cores',
};

function(seeds, rows, more, start='start') {
  type: 'reproduction',
  directory: 'experiments/self_distillation',
  seeds: seeds,
  experiments: {
    [start]: {
      configs: ['configs/hinted_sums/%s.jsonnet' % start],
      shared: true,
      seconds_per_run: 140,
      estimated_from: 'seen on one of two cores',
    },
  } + { [experiment_of(row)]: experiment(row, start) for row in rows },
  columns: [
    { name: 'test pass@1', evaluation: 'test', curve: 'validation' },
    { name: 'area over steps', area: { over: 'steps', upto: 96 }, curve: 'validation' },
    { name: 'stated without derivation', evaluation: 'test', value: 'leak/underived' },
    { name: 'right without derivation', evaluation: 'test', value: 'leak/underived_right' },
    { name: 'result contradicts lines', evaluation: 'test', value: 'leak/contradicted' },
    { name: 'repeats the hint', evaluation: 'test', value: 'leak/repeated_hint' },
  ],
  rows: [{ name: 'start', experiment: start }]
        + [{ name: row.name, experiment: experiment_of(row) } for row in rows],
  panels: [
    { name: 'validation accuracy', evaluation: 'validation' },
    { name: 'KL to the teacher, nats per token', metric: 'credit/teacher_kl' },
    { name: 'stated without derivation', evaluation: 'validation', value: 'leak/underived' },
    { name: 'scored tokens of an iteration', metric: 'credit/value_tokens' },
  ],
} + more
