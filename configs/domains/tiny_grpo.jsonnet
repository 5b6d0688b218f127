// GRPO on five domains at once.
(import 'tiny_rl.libsonnet')
+ (import '../methods/ppo_group_credit.jsonnet')
+ { experiment_name: 'domains/tiny_grpo' }
