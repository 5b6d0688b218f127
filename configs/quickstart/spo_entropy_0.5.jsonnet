(import 'policy_gradient.jsonnet')
+ (import '../presets/spo_entropy_0.5.jsonnet')
+ (import '../trainers/lr1e-4.jsonnet')
+ { experiment_name: 'quickstart/spo_entropy_0.5' }
