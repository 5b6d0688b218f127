// The baseline: from the start model that writes line after line, one completion to an answer.
(import 'rl.libsonnet')
+ {
  task+: { form: 'sequential' },
  rollout+: { parallel: false },
  evaluation+: { rollout+: { parallel: false } },
  model: {
    type: 'pretrained',
    name_or_path: $.directory + '/threadweaver/tiny/sft_sequential/checkpoints/last/policy',
  },
}
