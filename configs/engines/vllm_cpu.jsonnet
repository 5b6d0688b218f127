// One vLLM server on the CPU for a tiny model: large waves, and no prefix cache, since what short
// prompts share fills hardly one block of 32 tokens.
{
  engines+: {
    policy: {
      type: 'vllm',
      dtype: 'float32',
      servers: 'one',
      max_num_seqs: 512,
      max_num_batched_tokens: 16384,
      prefix_caching: false,
      async_scheduling: true,
      kv_cache_gib: 1,
    },
  },
}
