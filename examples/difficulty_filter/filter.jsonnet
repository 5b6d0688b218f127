// Rows that are always or never solved teach nothing: they go.
{
  type: 'filter_data',
  rules: [{ type: 'pass_rates', low: 0.1, weak: null, high: 0.9, missing: 'stop' }],
}
