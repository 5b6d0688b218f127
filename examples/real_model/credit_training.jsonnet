// Which credit learns most on the pretrained model: at equal tokens, and at equal optimizer steps. The two comparisons and both
// columns were declared before these seeds were run.
local method(name, iterations, seconds) = {
  configs: ['examples/real_model/%s.jsonnet' % name],
  overrides: [
    '{ experiment_name: "%s", iterations: %d, checkpoints: { every: 100 } }' % [name, iterations],
    // Validation after each iteration makes the curve; the test set is measured at the end.
    '{ evaluation+: { every: 1 } }',
  ],
  seconds_per_iteration: seconds,
  estimated_from: 'seen on one of two cores',
};
{
  type: 'reproduction',
  name: 'real_model_credit_training',
  title: 'Three credits on SmolLM2-135M-Instruct',
  directory: 'experiments/real_model_credit',
  seeds: std.range(11, 16),
  baseline: 'GRPO',
  comparisons: [{ row: row, to: 'GRPO' } for row in ['siblings', 'VinePPO, K = 3']],
  until: { difference: 0.05, assume: 'normal', column: 'area over tokens', seeds: { at_least: 3, at_most: 6 } },
  // VinePPO samples about twice the tokens of the others, so these have more iterations for the same tokens.
  experiments: { grpo: method('grpo', 8, 72), siblings: method('siblings', 8, 72), vineppo: method('vineppo', 5, 115) },
  columns: [
    { name: 'area over tokens', area: { over: 'tokens', upto: 12000 }, curve: 'validation' },
    { name: 'area over steps', area: { over: 'steps', upto: 8 }, curve: 'validation' },
    { name: 'test pass@1', evaluation: 'test', curve: 'validation' },
  ],
  rows: [
    { name: 'GRPO', experiment: 'grpo' },
    { name: 'siblings', experiment: 'siblings' },
    { name: 'VinePPO, K = 3', experiment: 'vineppo' },
  ],
}
