// As grpo.jsonnet, from the start model whose teacher never copies a hint.
(import 'grpo.jsonnet') + {
  experiment_name: 'hinted_sums/grpo_honest',
  model+: { name_or_path: $.directory + '/hinted_sums/start_honest/checkpoints/last/policy' },
}
