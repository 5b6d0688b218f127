(import 'policy_gradient.jsonnet')
+ (import '../presets/spo_3_3.jsonnet')
+ (import '../trainers/lr1e-4.jsonnet')
+ { experiment_name: 'quickstart/spo_3_3' }
