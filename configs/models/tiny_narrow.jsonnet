// A Llama of 0.2 million random weights over the task's characters: a third as dear as tiny.jsonnet.
{
  model: { type: 'tiny', layers: 2, hidden_size: 96, heads: 3, intermediate_size: 256, context_length: 128 },
  context_length: 128,
}
