// As opsd_start_teacher.jsonnet, from the start model whose teacher never copies a hint.
(import 'opsd_start_teacher.jsonnet') + {
  experiment_name: 'hinted_sums/opsd_start_teacher_honest',
  model+: { name_or_path: $.directory + '/hinted_sums/start_honest/checkpoints/last/policy' },
}
