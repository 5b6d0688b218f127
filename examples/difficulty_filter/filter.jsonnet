// Rows that the model always or never solves teach it nothing: they go.
local rates = 'data/difficulty';
{
  type: 'filter_data',
  rules: [{ type: 'pass_rates', strong: rates, low: 0.1, weak: rates, high: 0.9, missing: 'stop' }],
}
