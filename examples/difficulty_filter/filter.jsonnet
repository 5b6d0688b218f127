// Removes the rows that the model solves in less than 10 % or more than 90 % of its answers. `treetune filter_data` reads
// this file. The rule could compare two models, a strong one and a weak one; here both are the same.
local rates = 'data/difficulty';  // the folder that `treetune estimate_difficulty` wrote
{
  type: 'filter_data',
  rules: [{ type: 'pass_rates', strong: rates, low: 0.1, weak: rates, high: 0.9, missing: 'stop' }],
}
