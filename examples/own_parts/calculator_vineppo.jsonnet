// VinePPO with turns as steps, to compare with calculator_grpo.jsonnet: a turn's advantage is the value after it minus the
// value before it, from three continuations each.
(import 'calculator_grpo.jsonnet') + (import 'methods/vineppo.jsonnet') + {
  experiment_name: 'calculator/vineppo',
  credit+: { samples: 3, states: { type: 'turns' } },
}
