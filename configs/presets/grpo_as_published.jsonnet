// GRPO as published (Shao et al., arXiv:2402.03300): divided by the group's deviation, a mean over answers of
// means over tokens, KL in the loss.
(import 'preset.libsonnet')('grpo')
+ (import 'policy_gradient.libsonnet')
+ (import '../credit/group.jsonnet')
+ (import '../objectives/sequence_mean.jsonnet')
+ (import '../objectives/kl_in_loss.jsonnet')
