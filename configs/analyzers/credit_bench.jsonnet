// Credit methods on the same answers, against true advantages from many continuations: which credit is worth its tokens.
local monte_carlo(values, samples) = { type: 'monte_carlo', samples: samples, values: values };
local continuations = { type: 'continuations' };
local with_siblings = { type: 'continuations', count_siblings: true };
{
  analyzers+: [{
    type: 'credit_bench',
    methods: {
      GRPO: { type: 'group', std: true },
      'Dr. GRPO': { type: 'group', std: false },
      RLOO: { type: 'rloo' },
      siblings: monte_carlo({ type: 'siblings' }, 1),
      'siblings, smoothed': monte_carlo({ type: 'smoothed', over: { type: 'siblings' } }, 1),
      'VinePPO K=1': monte_carlo(continuations, 1),
      'VinePPO K=3': monte_carlo(continuations, 3),
      'VinePPO K=9': monte_carlo(continuations, 9),
      'K=3 and siblings': monte_carlo(with_siblings, 3),
      'siblings, topped up to 3': monte_carlo({ type: 'topped_up' }, 3),
      'siblings, topped up to 9': monte_carlo({ type: 'topped_up' }, 9),
      'K=1, smoothed': monte_carlo({ type: 'smoothed' }, 1),
      'K=3, smoothed': monte_carlo({ type: 'smoothed' }, 3),
      'K=1, filtered': monte_carlo({ type: 'filtered' }, 1),
      'K=3, filtered': monte_carlo({ type: 'filtered' }, 3),
      'K=1 and siblings, smoothed': monte_carlo({ type: 'smoothed', over: with_siblings }, 1),
      'bisect K=9': monte_carlo({ type: 'bisect' }, 9),
      'bisect K=3': monte_carlo({ type: 'bisect', threshold: 0.4 }, 3),
      'bisect K=9, smoothed': monte_carlo({ type: 'smoothed', over: { type: 'bisect' } }, 9),
      'sequential from 3': monte_carlo({ type: 'sequential' }, 3),
      'sequential with pilot': monte_carlo({ type: 'sequential', pilot: true }, 3),
    },
  }],
}
