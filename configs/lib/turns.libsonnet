// Tiny models that learn a game from random weights: eight answers to each of 32 problems, one step an iteration.
function(name, game, rollout)
  (import '../models/tiny.jsonnet')
  + (import '../engines/vllm_cpu.jsonnet')
  + (import '../trainers/tiny_one_step.jsonnet')
  + (import '../methods/ppo_group_credit.jsonnet')
  + {
    type: 'policy_iteration',
    directory: 'experiments',
    experiment_name: 'multi_turn/' + name,
    seed: 1,
    task: { type: 'environment', environment: game, train_size: 2000, validation_size: 100, test_size: 100 },
    model+: { layers: 2 },
    // A token a turn, with nothing but the environment's line in between.
    rollout: { type: 'multi_turn', samples: 8, turn_tokens: 1 } + rollout,
    problems_per_iteration: 32,
    selection: { type: 'all' },
    trainer+: { learning_rate: 1e-3 },
    iterations: 60,
    checkpoints: { every: 20 },
    evaluation: {
      every: 20,
      sets: [
        { split: 'validation', while_training: true },
        { split: 'test', samples: 4 },
      ],
    },
  }
