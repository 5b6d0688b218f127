// DPPO (Qi et al., arXiv:2602.04879) with the settings of verl's example: tokens whose probability has moved by more than
// 0.15 have no gradient, and credit and aggregation are Dr. GRPO's. Probabilities move where an iteration has several
// steps: set trainer.minibatch_size.
(import 'preset.libsonnet')('dppo')
+ (import 'policy_gradient.libsonnet')
+ (import '../credit/group_mean.jsonnet')
+ { trainer+: { objective: { type: 'dppo', divergence: 'tv', limit_low: 0.15, limit_high: 0.15 } } }
+ (import '../objectives/constant_length.jsonnet')
