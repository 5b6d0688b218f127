// GRPO, with one advantage for a whole answer. It starts from the weights of calculator_sft.jsonnet, which make the right
// calls in about four of ten answers.
local calculator = import 'calculator.libsonnet';
(import 'engines/in_process.jsonnet')
+ (import 'trainers/tiny_one_step.jsonnet')
+ (import 'methods/ppo_group_credit.jsonnet')
+ {
  type: 'policy_iteration',
  directory: 'experiments',
  experiment_name: 'calculator/grpo',
  imports: ['calculator'],
  seed: 1,
  task: { type: 'calculations', train_size: 20000, validation_size: 100, test_size: 200 },
  model: {
    type: 'pretrained',
    name_or_path: $.directory + '/calculator/sft/checkpoints/last/policy',
    chat: {},
  },
  context_length: 192,
  rollout: calculator.turns + { samples: 8 },
  selection: { type: 'all' },
  problems_per_iteration: 16,
  iterations: 20,
  checkpoints: { every: 20 },
  evaluation: {
    every: 5,
    sets: [{ split: 'validation', while_training: true, samples: 4 }, { split: 'test', samples: 4 }],
  },
}
