// Qwen/Qwen3-1.7B, asked in its chat template without thinking: for the right of an experiment.
(import 'asked_in_chat.libsonnet')
+ {
  model: {
    type: 'pretrained',
    name_or_path: 'Qwen/Qwen3-1.7B',
    dtype: 'bfloat16',
    attention: 'sdpa',
    chat: { template_arguments: { enable_thinking: false } },
  },
  context_length: 4096,
  experiment_name+: '_qwen3-1.7b',
}
