// Rows that a strong model never solves, and rows that a weak one nearly always does, go: at most 0.1 and at least 0.9,
// by the columns low_pass_rate and high_pass_rate that estimate_difficulty adds. `quotas` bounds each domain.
{
  type: 'filter_data',
  rules: [
    { type: 'pass_rates', low: 0.1, high: 0.9, missing: 'stop' },
  ],
}
