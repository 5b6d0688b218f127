// The learning rate of credit_equal_cost: GRPO and VinePPO (K = 3) at three rates, on seeds that the table doesn't use.
local table = import 'credit_equal_cost.jsonnet';
local rates = ['1e-4', '3e-4', '1e-3'];
local methods = { grpo: 'GRPO', vineppo_3: 'VinePPO, K = 3' };
local at(name, rate) = '%s_%s' % [name, rate];
table {
  name: 'credit_equal_cost_rates',
  title: 'The rate of learning at equal cost',
  seeds: [101, 102],
  baseline: null,
  pairs: [],
  until: null,
  // Through `super`, so that the start model lies where this table's runs do.
  local all = super.experiments,
  experiments: { start: all.start } + {
    [at(name, rate)]: all[name] {
      overrides+: ['{ experiment_name+: "_%s", trainer+: { learning_rate: %s } }' % [rate, rate]],
    }
    for name in std.objectFields(methods)
    for rate in rates
  },
  rows: [
    { name: '%s at %s' % [methods[name], rate], experiment: at(name, rate) }
    for name in std.objectFields(methods)
    for rate in rates
  ],
}
