// Qwen/Qwen2.5-1.5B-Instruct, asked in its chat template: for the right of an experiment.
(import 'asked_in_chat.libsonnet')
+ {
  model: {
    type: 'pretrained',
    name_or_path: 'Qwen/Qwen2.5-1.5B-Instruct',
    dtype: 'bfloat16',
    attention: 'sdpa',
    chat: {},
  },
  context_length: 4096,
  experiment_name+: '_qwen2.5-1.5b-instruct',
}
