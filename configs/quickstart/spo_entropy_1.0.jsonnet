(import 'policy_gradient.jsonnet')
+ (import '../presets/spo_entropy_1.0.jsonnet')
+ { experiment_name: 'quickstart/spo_entropy_1.0' }
