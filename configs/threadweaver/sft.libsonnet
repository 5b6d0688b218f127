// Supervised fine-tuning by ThreadWeaver's recipe: once through the training problems' solutions, 16 to a step (two on
// each of eight GPUs), cosine from 1e-5. Liger's kernels. The published context is raised to 131,072 by a setting of
// the model that no solution is long enough to need; the block of 40,960 tokens is the model's own context.
//
// Five iterations of 2,000 problems are 625 steps without a short one, with four checkpoints to resume from.
(import 'shared.libsonnet')
+ {
  model+: { liger: true },
  context_length: 40960,
  local sampled = super.rollout,
  rollout: { type: 'demonstrations', too_long: 'leave_out' },
  credit: { type: 'none' },
  selection: { type: 'all' },
  problems_per_iteration: 2000,
  problem_sampling: 'epochs',
  iterations: 5,
  trainer+: {
    objective: { type: 'mle' },
    learning_rate: 1e-5,
    schedule: { type: 'warmup', ratio: 0.05, decay: 'cosine' },
    adam_betas: [0.9, 0.95],
    weight_decay: 1e-4,
    epochs: 1,
    minibatch_size: 16,
    tokens_per_micro_batch: 40960,
    measure_kl: false,
  },
  checkpoints: { every: 1 },
  evaluation+: {
    rollout: sampled,
    sets+: [
      // Published of the fine-tuned model: 93.77 %.
      { name: 'train', split: 'train', samples: 1, temperature: 0.6, top_p: 0.95 },
    ],
  },
}
