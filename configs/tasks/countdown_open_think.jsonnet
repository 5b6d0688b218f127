// Asked without a chat template: the turns of Qwen's format as text, and a first line of the answer that ends
// within an open <think>. For base models, and for others as if they were. The single-file GRPO asks like that, in
// other words.
{
  task+: {
    prompt: std.rstripChars(|||
      <|im_start|>system
      You are a helpful assistant who thinks a problem through before answering it.<|im_end|>
      <|im_start|>user
      Make an expression that equals {target} out of the numbers {numbers}. Use +, -, *, / and brackets, and each number exactly once. Write your thoughts between <think> and </think>, and then the expression between <answer> and </answer>, such as <answer>(1 + 2) * 3</answer>.<|im_end|>
      <|im_start|>assistant
      I will solve this one step at a time.
      <think>
    |||, '\n'),
  },
}
