(import 'policy_gradient.jsonnet')
+ (import '../presets/cispo.jsonnet')
+ { experiment_name: 'quickstart/cispo' }
