// Tree-GRPO (Ji et al., arXiv:2509.21240, by its public code): two trees of three answers for each problem,
// which branch after turns (or steps) that are drawn at random; GRPO's advantage within a tree plus that over
// all answers. The loss has a mean over tokens, dual clipping, KL and an entropy bonus. Append it to an
// experiment whose rollout is `multi_turn`, or to one whose answers have no turns.
(import 'preset.libsonnet')('tree_grpo')
+ (import 'policy_gradient.libsonnet')
+ (import '../objectives/token_mean.jsonnet')
+ (import '../objectives/dual_clip.jsonnet')
+ {
  // Of the rollouts that it can be appended to, only `multi_turn` has the key `max_turns`.
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
