// What GRPO and VinePPO share: they begin with SFT's weights and differ in their credit alone.
(import 'shared.libsonnet') + {
  model+: { name_or_path: $.directory + '/sft/checkpoints/last/policy' },
  rollout: { type: 'single_turn', samples: 8, temperature: 1, max_tokens: 64 },
  iterations: 30,
  problems_per_iteration: 16,
  checkpoints: { every: 10 },
  trainer: {
    learning_rate: 1e-5,
    schedule: { type: 'warmup', steps: 2 },
    minibatch_size: 128,
    layout: 'tree',  // the prompt that eight answers share is computed once
    tokens_per_micro_batch: 2048,
    objective: { type: 'ppo', clip_low: 0.2, clip_high: 0.2 },
  },
  evaluation: {
    every: 10,
    sets: [
      { split: 'validation', problems: 100, samples: 1, while_training: true },
      { split: 'test', problems: 400, samples: 1 },
    ],
  },
}
