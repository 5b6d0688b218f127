// Dr. GRPO (Liu et al., arXiv:2503.20783): GRPO without its two biases, the deviation and the length.
(import 'preset.libsonnet')('dr_grpo')
+ (import 'policy_gradient.libsonnet')
+ (import '../credit/group_mean.jsonnet')
+ (import '../objectives/constant_length.jsonnet')
