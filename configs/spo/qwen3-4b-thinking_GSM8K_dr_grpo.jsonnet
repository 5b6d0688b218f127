// The baseline that the reference calls Dr. GRPO: 128 problems, four answers to each, groups without spread left
// out; reward less the group's mean, PPO's clip, a mean over tokens (not the published constant length), truncated
// importance sampling. 150 passes of some 58 steps.
(import 'qwen3-4b-thinking_GSM8K.libsonnet')
+ (import '../presets/dr_grpo.jsonnet')
+ (import '../objectives/token_mean.jsonnet')
+ (import '../objectives/importance_cap_2.jsonnet')
+ (import '../selections/mixed_groups.jsonnet')
+ {
  experiment_name: 'spo/qwen3-4b-thinking_GSM8K_dr_grpo',
  rollout+: { samples: 4 },
  problems_per_iteration: 128,
  iterations: 8700,
  on_empty_selection: 'skip',
}
