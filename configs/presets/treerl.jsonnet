// TreeRL (Hou et al., arXiv:2506.11902): branches where the policy was least sure; the advantage over the prompt and the
// one over the parent, divided by the root of the number of answers below.
(import 'preset.libsonnet')('treerl')
+ (import 'policy_gradient.libsonnet')
+ (import '../rollouts/tree_least_sure.jsonnet')
+ { credit: { type: 'tree', advantage: 'global_and_local', weight: 'sqrt_leaves' } }
