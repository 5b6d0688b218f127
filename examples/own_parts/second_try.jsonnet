// The quickstart's GRPO with a rollout of your own.
(import 'quickstart/grpo.jsonnet') + {
  imports: ['my_package.second_try'],
  experiment_name: 'quickstart/own_second_try',
  rollout+: { type: 'second_try', samples: 4 },
}
