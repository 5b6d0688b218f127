// 512 problems, one answer to each; 150 passes of some 14 steps over the training problems.
(import 'qwen3-4b-thinking_GSM8K.jsonnet')
+ (import '../presets/spo_rank_jsd.jsonnet')
+ {
  experiment_name: 'spo/qwen3-4b-thinking_GSM8K_spo_rank_jsd',
  rollout+: { samples: 1 },
  problems_per_iteration: 512,
  iterations: 2100,
}
