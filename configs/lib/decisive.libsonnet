// Where one choice decides and sixteen or more are free, at the same sign: what the noise of an outcome is laid on are the weights
// that decide. A tiny model that samples in its own process, so that a run takes seconds. `decision`: the first or the last of
// sixteen steps, the first of 32 (`long`) or of 48 (`longest`), `alone`, a step of its own before 24 free choices in one, or
// `all`, eight steps that must all be right.
local way = { steps: 16, rule: 'first', rates: [0.25] };
local tasks = {
  first: way,
  last: way { rule: 'last' },
  long: way { steps: 32 },
  longest: way { steps: 48 },
  all: { steps: 8, rule: 'all', rates: [0.84] },  // 0.84 to the power of 8 is a quarter
  alone: way { steps: 1, wandering: 24, grader: { type: 'signposts', whole: true } },
};

function(decision)
  local max_tokens = if decision == 'alone' then 54 else 3 * tasks[decision].steps + 6;
  local setting =
    (import '../models/tiny_narrow.jsonnet')
    + (if decision == 'longest' then { model+: { context_length: 192 }, context_length: 192 } else {})
    + (import '../engines/in_process.jsonnet')
    + {
      type: 'policy_iteration',
      directory: 'experiments',
      seed: 1,
      task: tasks[decision] {
        type: 'signposts',
        period: 1,
        options: 4,
        chatter: 0,
        signs: 4,
        names: 4,
        train_size: 6000,
        validation_size: 300,
        test_size: 300,
      },
      evaluation: {
        every: null,
        rollout: { type: 'single_turn', max_tokens: max_tokens },
        sets: [
          { split: 'validation', problems: 64, samples: 2, while_training: true },
          { split: 'test', problems: 256, samples: 2 },
        ],
      },
      checkpoints: { every: 1000 },
    };
  // On demonstrations of a teacher who guesses: one answer in four is right.
  local start_name = 'decisive/' + (if std.member(['first', 'last'], decision) then 'start' else decision + '_start');
  local start = setting + (import '../trainers/tiny_sft.jsonnet') + (import '../methods/sft.jsonnet') + {
    experiment_name: start_name,
    iterations: 4,
    problems_per_iteration: 4800,
  };
  // GRPO from the start model, one step an iteration. Other methods are appended to it.
  local on_policy = setting + (import '../trainers/tiny_one_step.jsonnet') + {
    experiment_name: 'decisive/' + decision,
    model: { type: 'pretrained', name_or_path: '%s/%s/checkpoints/last/policy' % [$.directory, start_name] },
    rollout: { type: 'single_turn', samples: 8, max_tokens: max_tokens },
    // Without the KL to the start, credits whose gradient is nearly nothing but at the deciding choice forget the form.
    trainer+: {
      objective+: { kl_coef: 0.05, kl_estimator: 'k3', kl_placement: 'loss' },
      schedule: { type: 'warmup', steps: 3 },
      advantage_normalisation: 'none',
    },
    problems_per_iteration: 16,
    iterations: 200,
    stop_after: { sampled_tokens: 150000 },
  } + (import '../methods/ppo_group_credit.jsonnet');
  { start:: start, on_policy:: on_policy }
