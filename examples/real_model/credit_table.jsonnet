// To append to grpo.jsonnet: how exact many credits are and how much they gain, on the start model and after training.
local bench = (import 'analyzers/credit_bench.jsonnet').analyzers[0].methods;
local topped_up(samples) = { type: 'monte_carlo', samples: samples, values: { type: 'topped_up' } };
{
  // vLLM computes a prefix once for all of its continuations.
  engines+: { policy: { type: 'vllm', replicas: 1, prefix_caching: true } },
  analyzers: [{
    type: 'credit_bench',
    checkpoints: [0, 8],
    problems: 16,
    truth: { type: 'continuations', samples: 128 },
    methods: {
      [name]: bench[name]
      for name in ['GRPO', 'RLOO', 'siblings', 'VinePPO K=1', 'VinePPO K=3', 'VinePPO K=9', 'K=1, filtered', 'K=3, filtered']
    } + {
      'siblings, topped up to 1': topped_up(1),
      'siblings, topped up to 3': topped_up(3),
      'probability mask': { type: 'probability_mask', over: { type: 'rloo' } },
      // The credits of the literature with the largest gains in the arena, without those that need a critic.
      'James-Stein': (import 'credit/james_stein.jsonnet').credit,
      RTMC: (import 'credit/rtmc.jsonnet').credit,
      TEMPO: (import 'credit/tempo.jsonnet').credit,
    },
    with_rollouts: {
      'tree, least sure': {
        rollout: {
          type: 'tree',
          samples: 4,
          max_tokens: $.rollout.max_tokens,
          branching: { type: 'least_sure', positions: 3, ways: 1 },
        },
        credit: { type: 'tree' },
      },
    },
  }],
}
