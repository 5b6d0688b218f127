(import 'policy_gradient.jsonnet')
+ (import '../presets/spo_entropy_0.5.jsonnet')
+ { experiment_name: 'quickstart/spo_entropy_0.5' }
