// The quickstart's setting: sums of four two-digit numbers, a model of 0.9 million weights, one CPU. A method is
// appended to it. All but SFT begin with the weights that SFT makes, and train on 12,800 sampled answers.
local setting = (import '../tasks/addition_chain.jsonnet')
                + (import '../models/tiny.jsonnet')
                + (import '../engines/vllm_cpu.jsonnet')
                + (import '../evaluations/quickstart.jsonnet')
                + { type: 'policy_iteration', directory: 'experiments', seed: 1 }
                // Of four numbers, and of the lines that sum them up.
                + { plan: { prompt_tokens: 13, answer_tokens: 36 } };

local from_sft = setting + (import '../rollouts/short_answers.jsonnet') + {
  model: { type: 'pretrained', name_or_path: $.directory + '/quickstart/sft/checkpoints/last/policy' },
};

local named(name) = { experiment_name: 'quickstart/' + name };

{
  // From random weights, on demonstrations of a teacher who makes mistakes.
  sft(name, method):: setting + (import '../trainers/tiny_sft.jsonnet') + method + named(name) + {
    iterations: 12,
    problems_per_iteration: 6400,
    evaluation+: { every: null },
    checkpoints: { every: 12 },
  },

  // 25 iterations of 64 problems with 8 answers each, one step an iteration.
  policy_gradient(name, method)::
    from_sft + (import '../trainers/tiny_one_step.jsonnet') + {
      selection: { type: 'all' },
      trainer+: { objective: { type: 'ppo' } },
      iterations: 25,
      checkpoints: { every: 5, keep_every: 5 },
    } + method + named(name),

  // As a policy gradient at a quarter of its rate: few tokens have a loss, and Adam makes its steps as large from
  // these as others' from all.
  correct_paths(name, method):: self.policy_gradient(name, method) + { trainer+: { learning_rate: 1e-4 } },

  // 64 answers to each of 200 problems; at most 16 pairs of a correct one and a wrong one to a problem. Validation
  // says how many epochs are good.
  preferences(name, method):: from_sft + method + named(name) + {
    rollout+: { samples: 64 },
    iterations: 1,
    problems_per_iteration: 200,
    selection+: { max_pairs_per_problem: 16 },
    trainer+: {
      objective+: { beta: 0.3 },
      learning_rate: 2e-4,
      schedule: { type: 'warmup', steps: 10 },
      minibatch_size: 64,
      epochs: 4,
      tokens_per_micro_batch: 8192,
    },
    choose_checkpoint: { set: 'validation', rule: 'best' },
  },

  // Five times the correct ones of 2560 answers. Validation says how many epochs are good.
  filtered(name, method):: from_sft + method + named(name) + {
    iterations: 5,
    problems_per_iteration: 320,
    trainer+: {
      learning_rate: 1e-3,
      schedule: { type: 'warmup', steps: 10, decay: 'linear' },
      minibatch_size: 64,
      epochs: 3,
      tokens_per_micro_batch: 8192,
    },
    choose_checkpoint: { set: 'validation', rule: 'best' },
    evaluation+: { every: 1 },
  },
}
