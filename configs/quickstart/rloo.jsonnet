(import 'policy_gradient.jsonnet')
+ (import '../credit/rloo.jsonnet')
+ { experiment_name: 'quickstart/rloo' }
