// Countdown as in RL2's example (ChenmienTan/RL2, four GPUs): four answers to each of 128 problems, and one step on
// those of problems that were not all alike; the reward less the group's mean, every token weighing the same. The
// answer ends at its closing tag. No warm-up: the example names a ratio of 0.1, but its scheduler is `constant`, which
// has none. Problems and prompt are ours, its data set has its own.
(import 'single_file_grpo.libsonnet')
+ (import '../tasks/countdown_scores_tinyzero_rl2.jsonnet')
+ (import '../credit/group_mean.jsonnet')
+ {
  experiment_name: 'countdown/qwen2.5-3b-instruct_rl2',
  model+: { name_or_path: 'Qwen/Qwen2.5-3B-Instruct' },
  context_length: 1408,
  task+: { grader+: { unclosed: true } },
  rollout+: { samples: 4, max_tokens: 1024, stop: ['</answer>'], unfinished_reward: 0.0 },
  problems_per_iteration: 128,
  iterations: 512,
  selection: { type: 'mixed_groups' },
  trainer+: {
    objective: { type: 'ppo', clip_low: 0.2, clip_high: 0.2, aggregation: 'token' },
    schedule: { type: 'warmup', steps: 0 },
    minibatch_size: null,
    offload_optimizer: true,
  },
  checkpoints: { every: 32, keep_every: 32 },
  evaluation: {
    every: 8,
    sets: [
      { split: 'validation', temperature: 0, while_training: true },
      { split: 'test', temperature: 0 },
    ],
  },
}
