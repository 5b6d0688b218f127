// Tree-GRPO (Ji et al., arXiv:2509.21240, as its public code): two trees of three answers, which branch after turns (or
// steps) that are drawn at random; GRPO's advantage within a tree plus that over all answers; a mean over tokens, dual
// clipping, KL and an entropy bonus in the loss. For an experiment whose answers have turns (`multi_turn`) or not.
(import 'preset.libsonnet')('tree_grpo')
+ (import 'policy_gradient.libsonnet')
+ (import '../objectives/token_mean.jsonnet')
+ (import '../objectives/dual_clip.jsonnet')
+ {
  local has_turns = 'rollout' in super && std.objectHas(super.rollout, 'max_turns'),
  rollout+: {
    type: if has_turns then 'turn_tree' else 'tree',
    samples: 2,
    branching: {
      type: 'random_states',
      states: { type: if has_turns then 'turns' else 'step_boundaries' },
      draws: 2,
      rounds: 1,
    },
  },
  credit: { type: 'tree', advantage: 'intra_and_inter', weight: 'each' },
  trainer+: {
    objective+: {
      kl_coef: 0.001,
      kl_estimator: 'k3',
      kl_placement: 'loss',
      kl_reduction: 'token_mean',
      entropy_coef: 0.001,
    },
  },
}
