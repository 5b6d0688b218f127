// How hard rows are: 16 answers to each, sampled and cut off as Guru's estimates with the weak model were (temperature 1, top-p 0.9,
// top-k 100, 4,096 tokens). Name your rows' routes, your model, and how many jobs share the work.
{
  type: 'estimate_difficulty',
  task: {
    type: 'rows',
    routes: { math: { type: 'math' } },
  },
  policy: {
    type: 'served',
    model: { type: 'pretrained', name_or_path: 'Qwen/Qwen2.5-7B-Instruct', dtype: 'bfloat16', chat: {} },
    engine: { type: 'vllm', prefix_caching: true },
    context_length: 8192,
  },
  answers: { samples: 16, max_tokens: 4096, temperature: 1.0, top_p: 0.9, top_k: 100 },
  shards: 8,
  jobs: { type: 'local', at_once: 1 },
  column: 'high_pass_rate',
}
