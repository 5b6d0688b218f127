// KL-Cov (Cui et al., arXiv:2505.22617): GRPO without a clip, in which the few tokens that lower the entropy most are held
// near the old policy. It needs several steps an iteration: set trainer.minibatch_size.
(import 'preset.libsonnet')('kl_cov')
+ (import 'policy_gradient.libsonnet')
+ (import '../credit/group.jsonnet')
+ { trainer+: { objective: { type: 'kl_cov', share: 2e-3, penalty: 1.0, aggregation: 'token' } } }
