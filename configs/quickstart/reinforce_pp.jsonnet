(import 'policy_gradient.jsonnet')
+ (import '../presets/reinforce_pp.jsonnet')
+ { experiment_name: 'quickstart/reinforce_pp' }
