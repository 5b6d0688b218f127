// What the tiny experiments with threads share. The parallel and the sequential ones begin with the same weights:
// the model has the same tokens in both.
(import '../../tasks/multiplication_threads.jsonnet')
+ (import '../../models/tiny.jsonnet')
+ (import '../../models/thread_tokens.jsonnet')
+ (import '../../engines/vllm_cpu.jsonnet')
+ {
  type: 'policy_iteration',
  directory: 'experiments',
  seed: 1,
  model+: { layers: 3, context_length: 208, alphabet: '0123456789*+=#:\n' },
  context_length: 208,
  evaluation: {
    every: 4,
    rollout: { type: 'parallel_threads', max_tokens: 192 },
    sets: [
      { split: 'validation', problems: 64, samples: 4, while_training: true },
      { split: 'test', problems: 256, samples: 4 },
    ],
  },
}
