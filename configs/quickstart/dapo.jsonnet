(import 'policy_gradient.jsonnet')
+ (import '../presets/dapo.jsonnet')
+ { experiment_name: 'quickstart/dapo' }
