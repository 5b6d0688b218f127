// REINFORCE++ (Hu et al., arXiv:2501.03262): no critic and no groups; KL in the reward, advantages whitened
// over the whole batch, PPO's clip.
(import 'preset.libsonnet')('reinforce_pp')
+ (import 'policy_gradient.libsonnet')
+ (import '../objectives/token_mean.jsonnet')
+ (import '../objectives/kl_in_reward.jsonnet')
+ { credit: { type: 'outcome' }, trainer+: { advantage_normalisation: 'whiten' } }
