(import 'policy_gradient.jsonnet')
+ (import '../credit/gae.jsonnet')
+ {
  experiment_name: 'quickstart/ppo',
  trainer+: { critic: { type: 'full_model', learning_rate: 1e-3 } },
}
