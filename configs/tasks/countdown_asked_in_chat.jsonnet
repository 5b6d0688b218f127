// The same asked in the model's own chat template: for the right of an experiment on Countdown with a model that
// was trained to chat.
{
  experiment_name+: '_in_chat',
  model+: { chat: {} },
  task+: {
    prompt: std.rstripChars(|||
      Make an expression that equals {target} out of the numbers {numbers}. Use +, -, *, / and brackets, and each number exactly once. Write your thoughts between <think> and </think>, and then the expression between <answer> and </answer>, such as <answer>(1 + 2) * 3</answer>.
    |||, '\n'),
  },
}
