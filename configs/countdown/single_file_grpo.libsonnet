// GRPO on Countdown with the settings of CohleM/RL-GRPO: eight answers to each of eight problems, four steps on
// them, each sequence weighing the same; a little entropy bonus, no KL, no warm-up. It ran on two GPUs that shared
// the model; here each has its own. It goes through its data once; 400 iterations and what is measured are ours.
(import '../tasks/countdown.jsonnet')
+ (import '../tasks/countdown_open_think.jsonnet')
+ (import '../tasks/countdown_scores_cohlem.jsonnet')
+ (import '../engines/vllm_per_gpu.jsonnet')
+ (import '../trainers/bf16.jsonnet')
+ {
  type: 'policy_iteration',
  directory: 'experiments',
  seed: 1,
  model: {
    type: 'pretrained',
    name_or_path: error 'name the model',
    dtype: 'bfloat16',
    attention: 'sdpa',
  },
  context_length: 1280,
  rollout+: { type: 'single_turn', samples: 8, max_tokens: 896, temperature: 1.0 },
  problems_per_iteration: 8,
  problem_sampling: 'epochs',
  iterations: 400,
  credit: { type: 'group', std: true, eps: 1.1920929e-07 },
  selection: { type: 'all' },
  trainer+: {
    objective: { type: 'ppo', clip_low: 0.2, clip_high: 0.2, aggregation: 'sequence', entropy_coef: 0.001 },
    learning_rate: 1e-6,
    weight_decay: 0.01,
    max_grad_norm: 1.0,
    minibatch_size: 16,
    measure_kl: false,
    zero_stage: 2,
  },
  checkpoints: { every: 20, keep_every: 20 },
  evaluation: {
    every: 20,
    sets: [
      { split: 'validation', problems: 250, while_training: true },
      { split: 'test', samples: 4 },
    ],
  },
}
