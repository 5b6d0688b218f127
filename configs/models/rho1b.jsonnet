// Rho-1B as published, before fine-tuning (the paper's revision begins with 0b1db8d2).
{
  model: {
    type: 'pretrained',
    name_or_path: 'microsoft/rho-math-1b-v0.1',
    dtype: 'bfloat16',
    attention: 'sdpa',
    begin_of_text: true,
  },
  context_length: 2048,
}
