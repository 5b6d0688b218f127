// Qwen/Qwen3-1.7B-Base, the base model: for the right of an experiment, supervised fine-tuning first.
{
  model: {
    type: 'pretrained',
    name_or_path: 'Qwen/Qwen3-1.7B-Base',
    dtype: 'bfloat16',
    attention: 'sdpa',
    begin_of_text: false,
  },
  context_length: 4096,
  experiment_name+: '_qwen3-1.7b-base',
}
