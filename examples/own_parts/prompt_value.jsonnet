// The quickstart's VinePPO with a value estimator of your own.
(import 'quickstart/vineppo.jsonnet') + {
  imports: ['my_package.prompt_value'],
  experiment_name: 'quickstart/own_prompt_value',
  credit+: { values: { type: 'prompt_value' } },
}
