// Clip-Cov (Cui et al., arXiv:2505.22617): GRPO, in which a few tokens that lower the entropy most have no gradient.
(import 'preset.libsonnet')('clip_cov')
+ (import 'policy_gradient.libsonnet')
+ (import '../credit/group.jsonnet')
+ { trainer+: { objective: { type: 'clip_cov', share: 2e-4, clip_low: 0.2, clip_high: 0.2, aggregation: 'token' } } }
