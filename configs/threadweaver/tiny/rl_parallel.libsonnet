// From the start model that writes threads.
(import 'rl.libsonnet')
+ {
  model: {
    type: 'pretrained',
    name_or_path: $.directory + '/threadweaver/tiny/sft_parallel/checkpoints/last/policy',
  },
}
