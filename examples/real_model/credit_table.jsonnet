// To append to grpo.jsonnet: how exact many credits are and how much they gain, on the start model and after training.
local bench = (import 'analyzers/credit_bench.jsonnet').analyzers[0].methods;
local bench_of(name, checkpoint, problems) = {
  type: 'credit_bench',
  name: name,
  checkpoints: [checkpoint],
  problems: problems,
  truth: { type: 'continuations', samples: 32 },
  methods: {
    [credit]: bench[credit]
    for credit in ['RLOO', 'GRPO', 'siblings', 'siblings, topped up to 3', 'VinePPO K=1', 'VinePPO K=3', 'VinePPO K=9', 'K=1, filtered']
  } + {
    'probability mask': { type: 'probability_mask', over: { type: 'rloo' } },
    // Credits of the literature with large gains in the arena, without those that need a critic.
    'James-Stein': (import 'credit/james_stein.jsonnet').credit,
    TEMPO: (import 'credit/tempo.jsonnet').credit,
  },
  with_rollouts: {
    'tree, least sure': {
      rollout: {
        type: 'tree',
        samples: 4,
        max_tokens: 40,
        branching: { type: 'least_sure', positions: 3, ways: 1 },
      },
      credit: { type: 'tree' },
    },
  },
};
{
  // vLLM computes a prefix once for all of its continuations.
  engines+: { policy: { type: 'vllm', replicas: 1, prefix_caching: true } },
  analyzers: [bench_of('credits_before_training', 0, problems=16), bench_of('credits_after_training', 8, problems=24)],
}
