// P-GRPO with the settings of ThreadWeaver's code: 128 problems, eight answers to each, one step on all of them; an
// answer's advantage is its reward less the group's mean, and every token that was sampled for it has it. No KL, no
// entropy, a constant rate. Measured and kept every 10 of 400 steps.
//
// The reward is the code's, where the README says something else: a wrong answer earns -1 (and not 0), a correct one up
// to 0.1 more for 1 - critical path / all tokens (and not all tokens / critical path - 1). Since a useless thread raises
// that, too, other references go in its place: `parallel_readme.jsonnet` and `parallel_sequential_reference.jsonnet`.
//
// With one step on what was just sampled all ratios are 1 and no clip is ever at work; its settings are kept for
// `trainer.minibatch_size`. The published code averages over micro-batches; here a token weighs 1/Σ T as in the paper.
(import 'shared.libsonnet')
+ (import '../credit/group_mean.jsonnet')
+ (import '../objectives/clip_higher.jsonnet')
+ (import '../objectives/dual_clip.jsonnet')
+ (import '../objectives/token_mean.jsonnet')
+ (import '../shaping/acceleration_published_code.jsonnet')
+ {
  model+: { attention: 'sdpa' },
  problems_per_iteration: 128,
  problem_sampling: 'epochs',
  iterations: 400,
  selection: { type: 'all' },
  trainer+: {
    objective+: { type: 'ppo', entropy_coef: 0.0 },
    learning_rate: 1e-6,
    schedule: { type: 'warmup', steps: 0 },
    weight_decay: 1e-2,  // as the framework has it that the published code is built on
    max_grad_norm: 1.0,
    epochs: 1,
    minibatch_size: null,
    tokens_per_micro_batch: 20480,  // speed alone; published: 10,240
    // No reference is needed; one would cost 16 GB of memory on each machine's CPU and a pass an iteration.
    measure_kl: false,
  },
  checkpoints: { every: 10, keep_every: 10 },
  evaluation+: { every: 10 },
}
