// GRPO and VinePPO from the same weights, two seeds each, evaluated on the same held-out problems.
local settings = 'examples/laptop.libsonnet';
local last = "{ evaluation+: { sets+: [{ split: 'test', problems: 200, samples: 4 }] } }";
local method(name) = {
  configs: ['configs/quickstart/%s.jsonnet' % name, settings],
  overrides: [last],
  seconds_per_iteration: 8,
  estimated_from: 'seen on one core',
};
{
  type: 'reproduction',
  name: 'two_methods',
  title: 'GRPO and VinePPO from the same weights',
  directory: 'experiments/examples/two_methods',
  seeds: [1, 2],
  baseline: 'GRPO',
  experiments: { grpo: method('grpo'), vineppo: method('vineppo') },
  columns: [{ name: 'test pass@1', evaluation: 'test', curve: 'validation' }],
  rows: [
    { name: 'GRPO', experiment: 'grpo' },
    { name: 'VinePPO', experiment: 'vineppo' },
  ],
}
