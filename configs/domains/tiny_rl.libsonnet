// What learns from its own answers on five domains: eight answers to each problem, one step an iteration.
(import 'tiny.libsonnet')
+ (import '../trainers/tiny_one_step.jsonnet')
+ {
  model: { type: 'pretrained', name_or_path: $.directory + '/domains/tiny_sft/checkpoints/last/policy' },
  rollout: { type: 'single_turn', samples: 8, max_tokens: 48 },
  problems_per_iteration: 72,
  iterations: 20,
  checkpoints: { every: 5, keep_every: 5 },
}
