// DeepSeekMath-7B as published, before fine-tuning (the paper's revision begins with 036a8c61). Sequences of
// up to 2499 tokens are trained; the paper's engine could sample longer ones, which its code then cut.
{
  model: {
    type: 'pretrained',
    name_or_path: 'deepseek-ai/deepseek-math-7b-base',
    dtype: 'bfloat16',
    attention: 'sdpa',
    begin_of_text: true,
  },
  context_length: 2499,
}
