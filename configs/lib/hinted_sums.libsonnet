// Sums of six one-digit numbers, a model of 0.2 million weights that samples in its own process, one core. A method
// is appended to `from_start`. All but `start` begin with its weights, and train on problems without hints.
local setting = (import '../tasks/hinted_sums.jsonnet')
                + (import '../models/tiny_narrow.jsonnet')
                + (import '../engines/in_process.jsonnet')
                + {
                  type: 'policy_iteration',
                  directory: 'experiments',
                  seed: 1,
                  evaluation: {
                    every: null,
                    rollout: { type: 'single_turn', max_tokens: 56 },
                    sets: [
                      { split: 'validation', problems: 128, samples: 2, while_training: true },
                      { split: 'test', problems: 300, samples: 4 },
                    ],
                  },
                  checkpoints: { every: 1000 },
                };

local from_start = setting + (import '../trainers/tiny_one_step.jsonnet') + {
  model: { type: 'pretrained', name_or_path: $.directory + '/hinted_sums/start/checkpoints/last/policy' },
  rollout: { type: 'single_turn', samples: 8, max_tokens: 56 },
};

// From random weights, on demonstrations. Half of the prompts have a hint. The teacher who sees it makes mistakes on
// 3 % of the lines.
local start = setting + (import '../trainers/tiny_sft.jsonnet') + (import '../methods/sft.jsonnet') + {
  task+: { hinted: 0.5, hinted_noise: 0.03 },
  iterations: 20,
  problems_per_iteration: 2500,
};

local named(name) = { experiment_name: 'hinted_sums/' + name };

{
  // The teacher who sees a hint always writes the right answer at the end.
  start: start + named('start'),

  // The teacher who sees a hint writes the result of the last line.
  start_honest: start + named('start_honest') + { task+: { copies_hint: false } },

  // 24 iterations of 16 problems with 8 answers each, and four steps an iteration.
  policy_gradient(name, method)::
    from_start + {
      selection: { type: 'all' },
      trainer+: {
        objective: { type: 'ppo' },
        advantage_normalisation: 'none',
        learning_rate: 1e-4,
        schedule: { type: 'warmup', steps: 3 },
        minibatch_size: 32,
      },
      problems_per_iteration: 16,
      iterations: 24,
      evaluation+: { every: 4 },
    } + method + named(name),

  // The same with GRPO's advantage replaced or shaped by a teacher whose prompt has a hint.
  self_distillation(name, credit)::
    self.policy_gradient(name, { credit: { type: 'self_distillation', template: '#{context}\n{prompt}' } + credit }),

  // The same without rewards: the policy learns the distributions of a teacher whose prompt has a hint.
  distribution_distillation(name, teacher, objective)::
    self.policy_gradient(name, {
      credit: { type: 'none' },
      trainer+: {
        objective: {
          type: 'distribution_distillation',
          teacher: { template: '#{context}\n{prompt}' } + teacher,
        } + objective,
      },
    }),

  // 16 answers to each of 160 problems; at most eight pairs of a correct one and a wrong one to a problem.
  preferences(name, method):: from_start + method + named(name) + {
    rollout+: { samples: 16 },
    iterations: 1,
    problems_per_iteration: 160,
    selection+: { max_pairs_per_problem: 8 },
    trainer+: {
      objective+: { beta: 0.3 },
      learning_rate: 2e-4,
      minibatch_size: 64,
      epochs: 2,
    },
  },
}
