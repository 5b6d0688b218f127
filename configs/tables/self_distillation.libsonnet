// A table of methods on hinted sums: `names` are the rows' titles by experiment, and `rates` further learning rates to try.
local on(name, rate) = {
  configs: ['configs/hinted_sums/%s.jsonnet' % name],
  overrides: if rate == null then [] else [
    '{ experiment_name+: "_%s", trainer+: { learning_rate: %s } }' % [rate, rate],
  ],
  needs: ['start'],
  seconds_per_run: 40,
  estimated_from: 'a guess for one of two cores',
};
local experiment_of(name, rate) = name + (if rate == null then '' else '_' + rate);

function(seeds, names, more, rates=[null]) {
  type: 'reproduction',
  directory: 'experiments/self_distillation',
  seeds: seeds,
  baseline: if rates == [null] then 'GRPO' else null,
  experiments: {
    start: {
      configs: ['configs/hinted_sums/start.jsonnet'],
      shared: true,
      seconds_per_run: 120,
      estimated_from: 'a guess for one of two cores',
    },
  } + {
    [experiment_of(name, rate)]: on(name, rate)
    for name in std.objectFields(names)
    for rate in rates
  },
  columns: [
    { name: 'test pass@1', evaluation: 'test', curve: 'validation' },
    { name: 'area over steps', area: { over: 'steps', upto: 96 }, curve: 'validation' },
    { name: 'stated without derivation', evaluation: 'test', value: 'leak/underived' },
    { name: 'result contradicts lines', evaluation: 'test', value: 'leak/contradicted' },
    { name: 'repeats the hint', evaluation: 'test', value: 'leak/repeated_hint' },
  ],
  rows: [{ name: 'start', experiment: 'start' }] + [
    { name: names[name] + (if rate == null then '' else ', ' + rate), experiment: experiment_of(name, rate) }
    for name in std.objectFields(names)
    for rate in rates
  ],
  panels: [
    { name: 'validation accuracy', evaluation: 'validation' },
    { name: 'KL to the teacher, nats per token', metric: 'credit/teacher_kl' },
    { name: 'stated without derivation', evaluation: 'validation', value: 'leak/underived' },
    { name: 'scored tokens of an iteration', metric: 'credit/value_tokens' },
  ],
} + more
