// The credit laboratory's tasks (configs/tasks/signposts_*.jsonnet), a model of 0.2 million weights, one core. A method
// is appended to a variant's setting; all but SFT begin with the weights that SFT makes on that variant.
//
//   (import '../lib/signposts.libsonnet')('fork').policy_gradient('vineppo', import '../methods/vineppo.jsonnet')
local tasks = {
  wandering: import '../tasks/signposts_wandering.jsonnet',
  fork: import '../tasks/signposts_fork.jsonnet',
  slips: import '../tasks/signposts_slips.jsonnet',
  repair: import '../tasks/signposts_repair.jsonnet',
  late: import '../tasks/signposts_late.jsonnet',
  coin: import '../tasks/signposts_coin.jsonnet',
  every: import '../tasks/signposts_every.jsonnet',
};

// Whose SFT a variant begins with, where the teachers are the same.
local starts = { late: 'fork' };

function(variant) (
  local start = std.get(starts, variant, variant);
  local setting = tasks[variant]
                  + (import '../models/tiny_narrow.jsonnet')
                  + (import '../engines/vllm_cpu.jsonnet')
                  + (import '../evaluations/quickstart.jsonnet')
                  + {
                    type: 'policy_iteration',
                    directory: 'experiments',
                    seed: 1,
                    evaluation+: { rollout+: { max_tokens: 56 } },
                  };

  local from_sft = setting + (import '../rollouts/short_answers.jsonnet') + {
    model: { type: 'pretrained', name_or_path: '%s/signposts/%s/sft/checkpoints/last/policy' % [$.directory, start] },
    rollout+: { max_tokens: 56 },
  };

  local named(name) = { experiment_name: 'signposts/%s/%s' % [variant, name] };

  {
    // From random weights, on demonstrations of a teacher who makes mistakes or guesses.
    sft: setting + (import '../trainers/tiny_sft.jsonnet') + (import '../methods/sft.jsonnet') + named('sft') + {
      iterations: 5,
      problems_per_iteration: 4800,
      evaluation+: { every: null },
      checkpoints: { every: 5 },
    },

    // 64 problems with 8 answers each and one step, an iteration.
    policy_gradient(name, method)::
      from_sft + (import '../trainers/tiny_one_step.jsonnet') + {
        selection: { type: 'all' },
        trainer+: { objective: { type: 'ppo' } },
        iterations: 20,
        checkpoints: { every: 10, keep_every: 10 },
      } + method + named(name),

    // 64 answers to each of 160 problems; at most 16 pairs of a correct one and a wrong one to a problem.
    preferences(name, method):: from_sft + method + named(name) + {
      rollout+: { samples: 64 },
      iterations: 1,
      problems_per_iteration: 160,
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

    // Five times the correct ones of 2048 answers.
    filtered(name, method):: from_sft + method + named(name) + {
      iterations: 5,
      problems_per_iteration: 256,
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
)
