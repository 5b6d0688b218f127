// Supervised fine-tuning: a tiny model learns to call a calculator, from single turns of a teacher who makes mistakes.
local calculator = import 'calculator.libsonnet';
(import 'models/tiny.jsonnet')
+ (import 'engines/in_process.jsonnet')
+ (import 'trainers/tiny_sft.jsonnet')
+ (import 'methods/sft.jsonnet')
+ {
  type: 'policy_iteration',
  directory: 'experiments',
  experiment_name: 'calculator/sft',
  imports: ['calculator'],
  seed: 1,
  task: {
    type: 'calculations',
    taught: true,
    slips: 0.35,
    train_size: 50000,
    validation_size: 100,
    test_size: 200,
  },
  model+: { layers: 2, context_length: 192, added_tokens: calculator.added_tokens, chat: calculator.chat },
  context_length: 192,
  rollout+: { graded: false },
  problems_per_iteration: 6400,
  iterations: 8,
  checkpoints: { every: 8 },
  evaluation: {
    every: null,
    rollout: calculator.turns + { samples: 2 },
    sets: [{ split: 'validation', while_training: true }, { split: 'test' }],
  },
}
