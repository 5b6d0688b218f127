(import 'policy_gradient.jsonnet')
+ (import '../presets/spo_3_2.jsonnet')
+ (import '../trainers/lr1e-4.jsonnet')
+ { experiment_name: 'quickstart/spo_3_2' }
