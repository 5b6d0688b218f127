// The credit laboratory's experiments, on each variant of signposts: configs/signposts/NAME.jsonnet is the field NAME.
local signposts = import '../lib/signposts.libsonnet';

// The start model of all others on a variant.
{ [variant + '_sft']: signposts(variant).sft for variant in ['coin', 'every', 'fork', 'repair', 'slips', 'wandering'] }

// VinePPO with 3 continuations a state, and the same experiment with GRPO's credit and nothing else changed.
+ {
  [variant + '_vineppo']:
    signposts(variant).policy_gradient('vineppo', import '../methods/vineppo.jsonnet') + { credit+: { samples: 3 } }
  for variant in ['coin', 'every', 'fork', 'late', 'repair', 'slips', 'wandering']
}
+ {
  [variant + '_grpo']: signposts(variant).policy_gradient('grpo', import '../methods/ppo_group_credit.jsonnet')
  for variant in ['coin', 'every', 'fork', 'late', 'repair', 'slips', 'wandering']
}
