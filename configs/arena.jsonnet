// The methods of `treetune arena`: a credit each, and a rollout where it makes its answers otherwise than all others.
local bench = (import 'analyzers/credit_bench_critic.jsonnet').analyzers[0].methods;
local literature = import 'credit/literature.libsonnet';
local dear = ['K=1 and siblings, smoothed', 'K=3 and siblings', 'K=3, filtered, and critic', 'K=9 and critic', 'bisect K=9, smoothed', 'critic, smoothed', 'sequential with pilot'];
// What the trainer makes of its critic's values is no credit of stored answers.
local asks_trainer = ['vapo', 'vc_ppo'];
local tree(branching, credit) = {
  rollout: { type: 'tree', samples: 4, max_tokens: 256, branching: branching },
  credit: credit,
};
local unsure = { type: 'least_sure', positions: 3, ways: 1 };
{
  methods: { [name]: { credit: bench[name] } for name in std.objectFields(bench) if !std.member(dear, name) } + {
    [std.strReplace(name, '_', ' ')]: literature[name]
    for name in std.objectFields(literature)
    if !std.member(asks_trainer, name)
  } + {
    'siblings, topped up to 1': { credit: { type: 'monte_carlo', samples: 1, values: { type: 'topped_up' } } },
    'tree, least sure': tree(unsure, { type: 'tree' }),
    'tree, least sure (TreeRL)': tree(unsure, { type: 'tree', advantage: 'global_and_local', weight: 'each' }),
  },
}
