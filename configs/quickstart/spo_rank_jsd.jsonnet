(import 'policy_gradient.jsonnet')
+ (import '../presets/spo_rank_jsd.jsonnet')
+ (import '../trainers/lr1e-4.jsonnet')
+ { experiment_name: 'quickstart/spo_rank_jsd' }
