(import 'policy_gradient.jsonnet')
+ (import '../presets/spo_rank_jsd.jsonnet')
+ { experiment_name: 'quickstart/spo_rank_jsd' }
