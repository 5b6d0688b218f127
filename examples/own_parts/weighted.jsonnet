// The quickstart's GRPO with an objective of your own.
(import 'quickstart/grpo.jsonnet') + {
  imports: ['my_package.weighted'],
  experiment_name: 'quickstart/own_weighted',
  trainer+: { objective+: { type: 'weighted_ppo', positive_weight: 0.1 } },
}
