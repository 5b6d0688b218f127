// GRPO and VinePPO from the same weights, two seeds each, evaluated on the same held-out problems.
local settings = 'examples/laptop.libsonnet';
local last = "{ evaluation+: { sets+: [{ split: 'test', problems: 200, samples: 4 }] } }";
local method(name, seconds) = {
  configs: ['configs/quickstart/%s.jsonnet' % name, settings],
  overrides: [last],
  seconds_per_iteration: seconds,
  estimated_from: 'seen on one core',
};
{
  type: 'reproduction',
  name: 'two_methods',
  title: 'GRPO and VinePPO from the same weights',
  directory: 'experiments/examples/two_methods',
  seeds: [1, 2],
  baseline: 'GRPO',
  experiments: { grpo: method('grpo', 1), vineppo: method('vineppo', 3) },
  columns: [{ name: 'test pass@1', evaluation: 'test', curve: 'validation' }],
  rows: [
    { name: 'GRPO', experiment: 'grpo' },
    { name: 'VinePPO', experiment: 'vineppo' },
  ],
}
