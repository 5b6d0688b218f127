// GSPO (Zheng et al., arXiv:2507.18071): ratio and clip of whole answers. Ratios leave 1 where an iteration has several
// steps: set trainer.minibatch_size (theirs: a quarter of the batch).
(import 'preset.libsonnet')('gspo')
+ (import 'policy_gradient.libsonnet')
+ (import '../credit/group.jsonnet')
+ { trainer+: { objective: { type: 'gspo', clip_low: 3e-4, clip_high: 4e-4, aggregation: 'sequence' } } }
