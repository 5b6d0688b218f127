// Appended to an experiment by `treetune credit_worth`: methods that any run can have, and no true values.
local all = (import 'credit_bench.jsonnet').analyzers[0].methods;
local topped_up(samples) = { type: 'monte_carlo', samples: samples, values: { type: 'topped_up' } };
{
  analyzers: [{
    type: 'credit_bench',
    name: 'credit_worth',
    problems: 128,
    truth: null,
    methods: {
      [name]: all[name]
      for name in ['GRPO', 'RLOO', 'siblings', 'VinePPO K=1', 'VinePPO K=3', 'VinePPO K=9', 'K=1, filtered', 'K=3, filtered', 'bisect K=3']
    } + {
      'siblings, topped up to 1': topped_up(1),
      'siblings, topped up to 3': topped_up(3),
    },
  }],
}
