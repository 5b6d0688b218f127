(import 'policy_gradient.jsonnet')
+ (import '../presets/spo_3_2.jsonnet')
+ { experiment_name: 'quickstart/spo_3_2' }
