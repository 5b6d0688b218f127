// VinePPO by turns, to compare with calculator_grpo.jsonnet: a turn's credit is the difference that it made, by three continuations.
(import 'calculator_grpo.jsonnet') + (import 'methods/vineppo.jsonnet') + {
  experiment_name: 'calculator/vineppo',
  credit+: { samples: 3, states: { type: 'turns' } },
}
