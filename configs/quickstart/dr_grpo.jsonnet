(import 'policy_gradient.jsonnet')
+ (import '../presets/dr_grpo.jsonnet')
+ { experiment_name: 'quickstart/dr_grpo' }
