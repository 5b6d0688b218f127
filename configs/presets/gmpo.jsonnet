// GMPO (Zhao et al., arXiv:2507.20673): the geometric mean of an answer's clipped ratios. Ratios leave 1 where an
// iteration has several steps: set trainer.minibatch_size.
(import 'preset.libsonnet')('gmpo')
+ (import 'policy_gradient.libsonnet')
+ (import '../credit/group.jsonnet')
+ { trainer+: { objective: { type: 'gmpo', clip_low: 0.4, clip_high: 0.4, aggregation: 'sequence' } } }
