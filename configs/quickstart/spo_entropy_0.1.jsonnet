(import 'policy_gradient.jsonnet')
+ (import '../presets/spo_entropy_0.1.jsonnet')
+ { experiment_name: 'quickstart/spo_entropy_0.1' }
