// Learning at equal cost: what every experiment on a variant of signposts has. One start model, made once, and runs that end
// when they have sampled a budget of tokens, however many iterations that takes.
local tasks = {
  distraction: import '../tasks/signposts_distraction.jsonnet',
  slips: import '../tasks/signposts_slips.jsonnet',
};
local budget = 120000, max_tokens = 80;

function(name)
  local setting =
    tasks[name]
    + (import '../models/tiny_narrow.jsonnet')
    + (import '../engines/vllm_cpu.jsonnet')
    + {
      type: 'policy_iteration',
      directory: 'experiments',
      seed: 1,
      engines+: { policy+: { omp_threads: 1 } },
      evaluation: {
        every: 5,
        rollout: { type: 'single_turn', max_tokens: max_tokens },
        sets: [
          { split: 'validation', problems: 64, samples: 2, while_training: true },
          { split: 'test', problems: 256, samples: 2 },
        ],
      },
      checkpoints: { every: 1000 },
    };
  local start = setting + (import '../trainers/tiny_sft.jsonnet') + (import '../methods/sft.jsonnet') + {
    experiment_name: 'equal_cost/%s_start' % name,
    iterations: 5,
    problems_per_iteration: 4800,
    evaluation+: { every: null },
  };
  // GRPO on eight problems with eight answers each and one step, an iteration; other methods are appended to it.
  local on_policy = setting + (import '../trainers/tiny_one_step.jsonnet') + {
    experiment_name: 'equal_cost/' + name,
    model: { type: 'pretrained', name_or_path: $.directory + '/equal_cost/%s_start/checkpoints/last/policy' % name },
    rollout: { type: 'single_turn', samples: 8, max_tokens: max_tokens },
    problems_per_iteration: 8,
    trainer+: { learning_rate: 1e-3, schedule: { type: 'warmup', steps: 3 }, measure_kl: false },
    iterations: 150,
    stop_after: { sampled_tokens: budget },
  } + (import '../methods/ppo_group_credit.jsonnet');
  { start:: start, on_policy:: on_policy }
