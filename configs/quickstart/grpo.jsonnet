(import 'policy_gradient.jsonnet')
+ (import '../credit/group.jsonnet')
+ { experiment_name: 'quickstart/grpo' }
