// One vLLM server per GPU, which sleeps while the trainer on that GPU works.
{
  engines+: {
    policy+: {
      type: 'vllm',
      dtype: 'bfloat16',
      servers: 'per_rank',
      sleep: true,
      prefix_caching: true,
      max_concurrency: 512,
      max_num_seqs: 512,
    },
  },
}
