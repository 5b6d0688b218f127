// A short run with threads, on one core: products of numbers from 11 to 25, a thread for each place of the second
// one. A teacher who makes mistakes on 12 % of the lines, and a model of 0.2 million weights that samples in its own
// process.
local setting = (import '../../models/tiny_narrow.jsonnet')
                + (import '../../models/thread_tokens.jsonnet')
                + (import '../../engines/in_process.jsonnet')
                + {
                  type: 'policy_iteration',
                  directory: 'experiments',
                  seed: 1,
                  task: {
                    type: 'multiplication',
                    factors: 2,
                    min_value: 11,
                    max_value: 25,
                    form: 'digits',
                    demonstration_noise: 0.12,
                    train_size: 80,
                    validation_size: 15,
                    test_size: 25,
                  },
                  model+: { alphabet: '0123456789*+=#:\n' },
                  evaluation: {
                    every: null,
                    rollout: { type: 'parallel_threads', max_tokens: 96 },
                    sets: [
                      { split: 'validation', samples: 4, while_training: true },
                      { split: 'test', samples: 8 },
                    ],
                  },
                  checkpoints: { every: 1000 },
                };

local start_name = 'threadweaver/tiny/short_start';

local from_start = setting + (import '../../trainers/tiny_one_step.jsonnet') + {
  model: { type: 'pretrained', name_or_path: '%s/%s/checkpoints/last/policy' % [$.directory, start_name] },
  rollout: { type: 'parallel_threads', samples: 8, max_tokens: 96 },
  selection: { type: 'all' },
  trainer+: {
    objective: { type: 'ppo' },
    advantage_normalisation: 'none',
    learning_rate: 3e-4,
    schedule: { type: 'warmup', steps: 3 },
    minibatch_size: 32,
    layout: 'tree',
  },
  problems_per_iteration: 16,
  iterations: 15,
  evaluation+: { every: 5 },
};

{
  start: setting + (import '../../trainers/tiny_sft.jsonnet') + (import '../../methods/sft.jsonnet') + {
    experiment_name: start_name,
    rollout+: { samples: 16 },
    iterations: 10,
    problems_per_iteration: 80,
    trainer+: { minibatch_size: 16, layout: 'tree' },
  },

  // 15 iterations of 16 problems with 8 answers each, and four steps an iteration.
  policy_gradient(name, credit):: from_start + credit + { experiment_name: 'threadweaver/tiny/' + name },
}
