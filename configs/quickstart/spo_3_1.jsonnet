(import 'policy_gradient.jsonnet')
+ (import '../presets/spo_3_1.jsonnet')
+ { experiment_name: 'quickstart/spo_3_1' }
