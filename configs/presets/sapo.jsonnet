// SAPO (Gao et al., arXiv:2511.20347): a soft gate in place of PPO's clip. Ratios leave 1 where an iteration has several
// steps: set trainer.minibatch_size.
(import 'preset.libsonnet')('sapo')
+ (import 'policy_gradient.libsonnet')
+ (import '../credit/group.jsonnet')
+ { trainer+: { objective: { type: 'sapo', tau_positive: 1.0, tau_negative: 1.05, aggregation: 'sequence' } } }
