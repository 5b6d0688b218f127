// DPO-positive as in the VinePPO paper: one iteration on pairs of the start model's own answers, right against
// wrong, at most 64 to a problem; three epochs, 64 pairs a step. No KL but the loss's own.
(import '../runtimes/policy_iteration.jsonnet')
+ (import '../rollouts/paper_sampling.jsonnet')
+ (import '../rollouts/all_problems_x64.jsonnet')
+ (import '../trainers/adamw_lr1e-6.jsonnet')
+ {
  credit: { type: 'none' },
  selection: { type: 'preference_pairs', max_pairs_per_problem: 64 },
  trainer+: {
    objective: { type: 'dpo_positive', positive_penalty: 50.0, label_smoothing: 0.0 },
    epochs: 3,
  },
  iterations: 1,
}
