// Supervised fine-tuning that makes the paper's start models: two passes over the training problems' own
// solutions, each solution weighing the same.
(import '../runtimes/policy_iteration.jsonnet')
+ (import '../trainers/adamw_lr1e-6.jsonnet')
+ {
  rollout: { type: 'demonstrations', too_long: 'leave_out' },
  credit: { type: 'none' },
  selection: { type: 'all' },
  trainer+: { objective: { type: 'mle', aggregation: 'sequence' } },
  iterations: 2,
  problems_per_iteration: null,
  problem_sampling: 'epochs',
  evaluation+: { rollout: (import '../rollouts/paper_sampling.jsonnet').rollout },
}
