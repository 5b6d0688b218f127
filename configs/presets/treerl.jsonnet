// TreeRL (Hou et al., arXiv:2506.11902): branches where the policy was least sure; a node's advantage over the other
// answers and that over its parent, of which its code divides each by the root of its own number of answers. All 30
// answers are trained (its code's `use_all_terminals`; its script draws 16 of them, one of them right if any is).
(import 'preset.libsonnet')('treerl')
+ (import 'policy_gradient.libsonnet')
+ (import '../rollouts/tree_least_sure.jsonnet')
+ { credit: { type: 'tree', advantage: 'global_and_local', weight: 'each' } }
