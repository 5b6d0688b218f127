// What the SPO experiments and their baseline share ("Exploring Paths", the settings of its code): Qwen3-4B-
// Thinking-2507 on GSM8K, 512 answers a step at temperature 1, one update on each, AdamW at a constant 1e-6,
// test problems greedily every 5 steps, weights every 20. One GPU of 80 GB, the optimiser in the memory of the CPU.
//
// Defaults are kept: the text after the thought is graded by value, and the target is constant. For the reference's
// verdicts and moving target, append compat/grader_gsm8k_lenient.jsonnet and compat/spo_moving_target.jsonnet.
(import '../runtimes/policy_iteration.jsonnet')
+ (import '../tasks/gsm8k_thinking.jsonnet')
+ (import '../engines/vllm_per_gpu.jsonnet')
+ (import '../trainers/bf16.jsonnet')
+ {
  task+: { validation_size: null },  // all 7473 are trained on
  rollout: { type: 'single_turn', temperature: 1.0, max_tokens: 8192 },
  trainer+: {
    learning_rate: 1e-6,
    schedule: { type: 'warmup', steps: 0 },
    weight_decay: 1e-2,
    max_grad_norm: 1.0,
    tokens_per_micro_batch: 8576,
    zero_stage: 2,
    offload_optimizer: true,
    // The loss needs no reference; one would cost another 8 GB of memory on the CPU and a pass an iteration.
    measure_kl: false,
  },
  evaluation: {
    every: 5,
    sets: [{ split: 'test', temperature: 0, samples: 1, while_training: true }],
  },
  checkpoints: { every: 20, keep_every: 20 },
  problem_sampling: 'epochs',
}
+ (import '../models/qwen3-4b-thinking-2507.jsonnet')
