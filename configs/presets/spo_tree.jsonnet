// SPO-tree (Guo et al., arXiv:2505.23564): a tree of segments of 600 tokens, six from each; a segment's value less its
// parent's, every segment once, those without advantage and tokens that were sampled with 0.9 or more not at all;
// advantages whitened, over the iteration (its code: over each step of a device). Without its bound of 32 segments of a
// problem in an iteration, and without those of up to eight earlier ones, which it trains then: they are off-policy.
(import 'preset.libsonnet')('spo_tree')
+ (import 'policy_gradient.libsonnet')
+ (import '../rollouts/tree_every_600_tokens.jsonnet')
+ {
  credit: { type: 'tree', advantage: 'local', weight: 'once' },
  selection: { type: 'tokens', below: 0.9 },
  trainer+: { advantage_normalisation: 'whiten' },
}
