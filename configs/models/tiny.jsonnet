// A Llama of 0.9 million random weights over the task's characters.
{
  model: { type: 'tiny', layers: 4, hidden_size: 128, heads: 4, intermediate_size: 384, context_length: 128 },
  context_length: 128,
}
