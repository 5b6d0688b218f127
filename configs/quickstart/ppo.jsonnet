(import 'policy_gradient.jsonnet')
+ (import '../credit/gae.jsonnet')
+ {
  experiment_name: 'quickstart/ppo',
  credit+: { critic: { learning_rate: 1e-3 } },
}
