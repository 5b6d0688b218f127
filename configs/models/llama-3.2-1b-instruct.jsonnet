// meta-llama/Llama-3.2-1B-Instruct, asked in its chat template on a fixed date: for the right of an experiment.
(import 'asked_in_chat.libsonnet')
+ {
  model: {
    type: 'pretrained',
    name_or_path: 'meta-llama/Llama-3.2-1B-Instruct',
    dtype: 'bfloat16',
    attention: 'sdpa',
    chat: { template_arguments: { date_string: '26 Jul 2024' } },
  },
  context_length: 4096,
  experiment_name+: '_llama-3.2-1b-instruct',
}
