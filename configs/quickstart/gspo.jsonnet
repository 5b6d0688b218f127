(import 'policy_gradient.jsonnet')
+ (import '../presets/gspo.jsonnet')
+ { experiment_name: 'quickstart/gspo' }
