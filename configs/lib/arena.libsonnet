// The methods of `treetune arena`: a credit each, and a rollout where it makes its answers otherwise than all others.
local bench = (import '../analyzers/credit_bench_critic.jsonnet').analyzers[0].methods;
// Credits of the literature that need no turns, no words, no greedy answers and no trainer.
local literature = {
  'ComMCS K=3': import '../credit/com_mcs.jsonnet',
  GTPO: import '../credit/gtpo.jsonnet',
  'GRPO-λ': import '../credit/grpo_lambda.jsonnet',
  ICT: import '../credit/ict.jsonnet',
  'James-Stein': import '../credit/james_stein.jsonnet',
  MaxRL: import '../credit/max_rl.jsonnet',
  OPO: import '../credit/opo.jsonnet',
  'PKPO k=4': import '../credit/pkpo.jsonnet',
  RREDCoT: import '../credit/rredcot.jsonnet',
  RTMC: import '../credit/rtmc.jsonnet',
  'SPO-chain': import '../credit/spo_chain.jsonnet',
  TEMPO: import '../credit/tempo.jsonnet',
  TRACE: import '../credit/trace.jsonnet',
  'pass@4': import '../credit/pass_at_k.jsonnet',
  'V0.5': import '../credit/v0_5.jsonnet',
  'forking tokens': import '../credit/forking_tokens.jsonnet',
  'optimal token baseline': import '../credit/optimal_token_baseline.jsonnet',
  'λ-GRPO': import '../credit/lambda_grpo.jsonnet',
};
local dear = ['K=1 and siblings, smoothed', 'K=3 and siblings', 'K=3, filtered, and critic', 'K=9 and critic', 'bisect K=9, smoothed', 'critic, smoothed', 'sequential with pilot'];
local tree(branching, credit) = {
  rollout: { type: 'tree', samples: 4, max_tokens: 256, branching: branching },
  credit: credit,
};
local self_distillation(settings) = {
  credit: { type: 'self_distillation', template: '-1 {context} {prompt}' } + settings,
};
local unsure = { type: 'least_sure', positions: 3, ways: 1 };
{
  methods: { [name]: { credit: bench[name] } for name in std.objectFields(bench) if !std.member(dear, name) } + literature + {
    'optimal token baseline, exact': { credit: literature['optimal token baseline'].credit + { squared_norms: 'exact' } },
    // A teacher that knows that the answer will be correct: TableEngine's prompt of -1, the reference answer and 1.
    CPO: self_distillation({ outcome_weight: 1.0, clip: 1.0, keeps_sign: true }),
    'softmax of surprise': { credit: { type: 'weighted_by', over: { type: 'rloo' }, signal: 'surprise', weights: 'softmax' } },
    OPSD: self_distillation({ clip: 1.0 }),
    'siblings, topped up to 1': { credit: { type: 'monte_carlo', samples: 1, values: { type: 'topped_up' } } },
    'tree, least sure': tree(unsure, { type: 'tree' }),
    'tree, least sure (TreeRL)': tree(unsure, { type: 'tree', advantage: 'global_and_local', weight: 'each' }),
  },
}
