// GRPO's credit: an answer is worth its reward minus the group's mean, over the group's standard deviation.
(import 'shared.libsonnet') + (import 'methods/ppo_group_credit.jsonnet') + { experiment_name: 'grpo' }
