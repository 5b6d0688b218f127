// VinePPO by turns beside calculator_grpo.jsonnet: a turn is worth the difference that it made, by three continuations.
(import 'calculator_grpo.jsonnet') + (import 'methods/vineppo.jsonnet') + {
  experiment_name: 'calculator/vineppo',
  credit+: { samples: 3, states: { type: 'turns' } },
}
