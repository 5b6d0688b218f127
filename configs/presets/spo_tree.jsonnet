// SPO-tree (Guo et al., arXiv:2505.23564): a tree of segments of 600 tokens, six from each; a segment's value less its
// parent's, every segment once. Without its mask of likely tokens and its replay of segments of earlier trees.
(import 'preset.libsonnet')('spo_tree')
+ (import 'policy_gradient.libsonnet')
+ (import '../rollouts/tree_every_600_tokens.jsonnet')
+ { credit: { type: 'tree', advantage: 'local', weight: 'once' } }
