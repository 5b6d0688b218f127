(import 'policy_gradient.jsonnet')
+ (import '../presets/spo_entropy_1.0.jsonnet')
+ (import '../trainers/lr1e-4.jsonnet')
+ { experiment_name: 'quickstart/spo_entropy_1.0' }
