// Qwen/Qwen2.5-7B, the base model: for the right of an experiment, supervised fine-tuning first.
{
  model: {
    type: 'pretrained',
    name_or_path: 'Qwen/Qwen2.5-7B',
    dtype: 'bfloat16',
    attention: 'sdpa',
    begin_of_text: false,
  },
  context_length: 4096,
  experiment_name+: '_qwen2.5-7b',
}
