// The quickstart's PPO with a critic's credit of one's own.
(import 'quickstart/ppo.jsonnet') + {
  imports: ['my_package.two_lambdas'],
  experiment_name: 'quickstart/own_two_lambdas',
  credit+: { type: 'two_lambdas', lam: 0.95 },
}
