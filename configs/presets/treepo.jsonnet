// TreePO (Li et al., arXiv:2508.17445): a tree that widens until there are 16 answers; an answer's advantages over the
// groups of all its beginnings, averaged, divided by their deviation over the iteration.
(import 'preset.libsonnet')('treepo')
+ (import 'policy_gradient.libsonnet')
+ (import '../rollouts/tree_up_to_width.jsonnet')
+ (import '../objectives/clip_higher.jsonnet')
+ (import '../objectives/token_mean.jsonnet')
+ {
  credit: { type: 'tree', advantage: 'subgroups', weight: 'leaves' },
  trainer+: { advantage_normalisation: 'scale' },
}
