// To append to an experiment of this folder: all problems of GSM8K and MATH-500, with up to 512 tokens for an answer.
local sets = (import 'benchmarks.libsonnet').evaluation.sets;
{
  context_length: 1536,
  // Answers of 512 tokens need a server: the engine in the run's own process is meant for short ones.
  engines+: { policy: { type: 'vllm', replicas: 1, dtype: 'bfloat16', kv_cache_gib: 4 } },
  evaluation: {
    sets: [set { problems: null, max_tokens: 512 } for set in sets if set.name != 'test_greedy'],
  },
}
