(import 'policy_gradient.jsonnet')
+ (import '../credit/monte_carlo_3.jsonnet')
+ { experiment_name: 'quickstart/vineppo' }
