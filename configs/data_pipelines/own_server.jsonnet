// Append it to a data pipeline: it asks a server of your own (vLLM, SGLang, llama.cpp) on this machine. It costs nothing.
{
  endpoint: {
    base_url: 'http://127.0.0.1:8000/v1',
    model: 'Qwen/Qwen3-8B',
    concurrency: 32,
    temperature: 0.6,
    max_tokens: 16384,
  },
  extra_for: {},
  prices: null,
  budget: null,
}
