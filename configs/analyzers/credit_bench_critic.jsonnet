// credit_bench with the methods that ask a critic, for experiments that train one.
local bench = (import 'credit_bench.jsonnet').analyzers[0];
local monte_carlo(values, samples) = { type: 'monte_carlo', samples: samples, values: values };
local control_variate = { type: 'control_variate' };
{
  analyzers+: [bench {
    methods+: {
      critic: monte_carlo({ type: 'critic' }, 1),
      'critic, smoothed': monte_carlo({ type: 'smoothed', over: { type: 'critic' } }, 1),
      'K=1 and critic': monte_carlo(control_variate, 1),
      'K=3 and critic': monte_carlo(control_variate, 3),
      'K=3, filtered, and critic': monte_carlo({ type: 'control_variate', over: { type: 'filtered' } }, 3),
      'K=9 and critic': monte_carlo(control_variate, 9),
    },
  }],
}
