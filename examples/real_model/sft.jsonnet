// The chat model learns the form of a solution: three lines and "#### ", from 192 rows, seen once.
(import 'shared.libsonnet') + (import 'methods/sft.jsonnet') + {
  experiment_name: 'sft',
  iterations: 1,
  problems_per_iteration: 192,
  trainer+: {
    learning_rate: 1e-4,
    schedule: { type: 'warmup', steps: 3 },
    minibatch_size: 16,
    tokens_per_micro_batch: 2048,
  },
  evaluation: {
    rollout: { type: 'single_turn', temperature: 1, max_tokens: 64, samples: 1 },
    sets: [{ split: 'test', problems: 100, samples: 1 }],
  },
}
