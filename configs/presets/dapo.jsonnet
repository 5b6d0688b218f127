// DAPO (Yu et al., arXiv:2503.14476): clip-higher, a mean over tokens, groups without spread replaced by
// others, a soft penalty for answers that come near the limit, no KL.
(import 'preset.libsonnet')('dapo')
+ (import 'policy_gradient.libsonnet')
+ (import '../credit/group.jsonnet')
+ (import '../objectives/clip_higher.jsonnet')
+ (import '../objectives/token_mean.jsonnet')
+ (import '../shaping/overlong_penalty.jsonnet')
+ (import '../rollouts/until_mixed.jsonnet')
