// The methods of `treetune arena`: a credit each, and a rollout where it makes its answers otherwise than all others.
local bench = (import '../analyzers/credit_bench_critic.jsonnet').analyzers[0].methods;
local literature = import '../credit/literature.libsonnet';
// Those that see no turns, no words and no trainer.
local name_of = {
  'ComMCS K=3': 'com_mcs',
  'James-Stein': 'james_stein',
  RTMC: 'rtmc',
  'SPO-chain': 'spo_chain',
  TEMPO: 'tempo',
  'V0.5': 'v0_5',
  'forking tokens': 'forking_tokens',
  'optimal token baseline': 'optimal_token_baseline',
  'λ-GRPO': 'lambda_grpo',
};
local dear = ['K=1 and siblings, smoothed', 'K=3 and siblings', 'K=3, filtered, and critic', 'K=9 and critic', 'bisect K=9, smoothed', 'critic, smoothed', 'sequential with pilot'];
local tree(branching, credit) = {
  rollout: { type: 'tree', samples: 4, max_tokens: 256, branching: branching },
  credit: credit,
};
local unsure = { type: 'least_sure', positions: 3, ways: 1 };
{
  methods: { [name]: { credit: bench[name] } for name in std.objectFields(bench) if !std.member(dear, name) } + {
    [name]: literature[name_of[name]]
    for name in std.objectFields(name_of)
  } + {
    'optimal token baseline, exact': { credit: literature.optimal_token_baseline.credit + { squared_norms: 'exact' } },
    'siblings, topped up to 1': { credit: { type: 'monte_carlo', samples: 1, values: { type: 'topped_up' } } },
    'tree, least sure': tree(unsure, { type: 'tree' }),
    'tree, least sure (TreeRL)': tree(unsure, { type: 'tree', advantage: 'global_and_local', weight: 'each' }),
  },
}
