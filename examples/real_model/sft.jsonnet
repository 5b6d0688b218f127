// The chat model learns the form of a solution, three lines and "#### ", from 192 rows, each seen once. A higher learning rate
// makes answers right more often and all alike, so that a group of answers tells little.
(import 'shared.libsonnet') + (import 'methods/sft.jsonnet') + {
  experiment_name: 'sft',
  iterations: 1,
  problems_per_iteration: 192,
  trainer+: {
    learning_rate: 5e-5,
    schedule: { type: 'warmup', steps: 3 },
    minibatch_size: 16,
    tokens_per_micro_batch: 2048,
  },
  evaluation: {
    rollout: { type: 'single_turn', temperature: 1, max_tokens: 64, samples: 1 },
    sets: [{ split: 'test', problems: 100, samples: 1 }],
  },
}
