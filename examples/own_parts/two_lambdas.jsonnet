// The quickstart's PPO with a credit of your own that uses the critic.
(import 'quickstart/ppo.jsonnet') + {
  imports: ['my_package.two_lambdas'],
  experiment_name: 'quickstart/own_two_lambdas',
  credit+: { type: 'two_lambdas', lam: 0.95 },
}
