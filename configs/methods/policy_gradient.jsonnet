// What the paper's policy-gradient methods share: everything but the credit.
(import '../runtimes/policy_iteration.jsonnet')
+ (import '../rollouts/paper_sampling.jsonnet')
+ (import '../rollouts/64x8.jsonnet')
+ (import '../trainers/adamw_lr1e-6.jsonnet')
+ (import '../trainers/ppo_clip0.2.jsonnet')
+ (import '../trainers/klLoss_1e-4.jsonnet')
+ { selection: { type: 'all' } }
