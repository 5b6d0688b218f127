// GRPO from the tiny Countdown's start model: eight searches for each of 64 problems, one step an iteration.
(import 'tiny.libsonnet')
+ (import '../rollouts/short_answers.jsonnet')
+ (import '../trainers/tiny_one_step.jsonnet')
+ (import '../methods/ppo_group_credit.jsonnet')
+ {
  experiment_name: 'countdown/tiny_grpo',
  model: { type: 'pretrained', name_or_path: $.directory + '/countdown/tiny_sft/checkpoints/last/policy' },
  rollout+: { max_tokens: 96 },
  iterations: 25,
  checkpoints: { every: 5, keep_every: 5 },
}
