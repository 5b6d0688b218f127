// meta-llama/Llama-3.2-1B, the base model: for the right of an experiment, supervised fine-tuning first.
{
  model: {
    type: 'pretrained',
    name_or_path: 'meta-llama/Llama-3.2-1B',
    dtype: 'bfloat16',
    attention: 'sdpa',
    begin_of_text: true,
  },
  context_length: 4096,
  experiment_name+: '_llama-3.2-1b',
}
