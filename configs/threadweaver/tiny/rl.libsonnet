// P-GRPO on what the tiny start models know: eight answers to each of 32 problems, an answer's advantage its reward less
// the group's mean, one step an iteration on the prefix trees of the groups.
(import 'base.libsonnet')
+ (import '../../methods/ppo_loss.jsonnet')
+ (import '../../trainers/tiny_one_step.jsonnet')
+ (import '../../credit/group_mean.jsonnet')
+ {
  rollout: { type: 'parallel_threads', samples: 8, max_tokens: 192 },
  problems_per_iteration: 32,
  iterations: 12,
  trainer+: { layout: 'tree' },
  checkpoints: { every: 4, keep_every: 4 },
}
