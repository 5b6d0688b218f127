// A table of GRPO and VinePPO with two seeds each. `treetune reproduce_table` runs its experiments.
local settings = 'examples/laptop.libsonnet';
// Evaluates the last weights on test problems.
local last = "{ evaluation+: { sets+: [{ split: 'test', problems: 200, samples: 4 }] } }";
local method(name, seconds) = {
  configs: ['configs/quickstart/%s.jsonnet' % name, settings],
  overrides: [last],
  seconds_per_iteration: seconds,
  estimated_from: 'a run on one core',
};
{
  type: 'reproduction',
  name: 'two_methods',
  title: 'GRPO and VinePPO from the same weights',
  directory: 'experiments/examples/two_methods',
  seeds: [1, 2],
  baseline: 'GRPO',
  experiments: { grpo: method('grpo', 1), vineppo: method('vineppo', 3) },
  columns: [{ name: 'test pass@1', evaluation: 'test', curve: 'validation' }],  // the curve shows validation problems
  rows: [
    { name: 'GRPO', experiment: 'grpo' },
    { name: 'VinePPO', experiment: 'vineppo' },
  ],
}
