// TreePO (Li et al., arXiv:2508.17445): a tree that widens until there are 16 answers; an answer's advantages over the
// groups of all its beginnings, averaged, and whitened over all tokens of all answers, as its code does (the paper
// divides by the deviation alone). Trained whole, as there; `layout: 'tree'` runs what answers share once.
(import 'preset.libsonnet')('treepo')
+ (import 'policy_gradient.libsonnet')
+ (import '../rollouts/tree_up_to_width.jsonnet')
+ (import '../objectives/clip_higher.jsonnet')
+ (import '../objectives/token_mean.jsonnet')
+ {
  credit: { type: 'tree', advantage: 'subgroups', weight: 'each' },
  trainer+: { advantage_normalisation: 'whiten' },
}
