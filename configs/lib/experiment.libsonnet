// experiment(model, method, data): the experiments of the VinePPO paper (Kazemnejad et al., arXiv:2410.01679), and
// GRPO's and RLOO's credit in the same setting. The methods are those of configs/methods; here are the paper's
// settings for a model, a method, a data set, and for two of them together.
//
//   (import 'lib/experiment.libsonnet')('rho1bSft2', 'vineppo', 'MATH')

// Few prompts are long: those over 1512 tokens are left out of training, and where the context is shorter than
// prompt and 1024 tokens, an answer may fill what is left of it.
local sampling = {
  type: 'single_turn',
  temperature: 0.6,
  top_p: 0.9,
  max_tokens: 1024,
  stop: ['\n\n\nProblem:'],
  max_prompt_tokens: 1512,
};

// AdamW, 64 sequences a step, 3 % warm-up from 0, then linear decay to 0 at the run's last step.
// (compat/warmup_deepspeed.jsonnet has the warm-up that the paper's code really ran.)
local optimiser = {
  learning_rate: 1e-6,
  schedule: { type: 'warmup', ratio: 0.03, decay: 'linear' },
  adam_betas: [0.9, 0.999],
  adam_eps: 1e-8,
  weight_decay: 0.0,
  max_grad_norm: 1.0,
  minibatch_size: 64,
};

local shared = (import '../runtimes/policy_iteration.jsonnet') + { trainer+: optimiser };

local data_sets = {
  GSM8K: {
    fragment: (import '../tasks/gsm8k.jsonnet') + (import '../evaluations/GSM8K.jsonnet'),
    iterations: 650,
    dpo_beta: 0.3,
    // The paper's code gives nothing to the steps after the 26th state, which biases the gradient of the few longer
    // answers ('one_step' doesn't).
    max_states: { max_states: 26, behind_max_states: 'no_advantage' },
  },
  MATH: {
    fragment: (import '../tasks/math.jsonnet') + (import '../evaluations/MATH.jsonnet'),
    iterations: 1000,
    dpo_beta: 0.1,
    max_states: {},
  },
};

// Rho-1B on GPUs of 80 GB (the paper: four). ZeRO 1 is the least that bfloat16 goes with.
local rho1b = {
  fragment: (import '../models/rho1b.jsonnet')
            + (import '../engines/vllm_per_gpu.jsonnet')
            + (import '../trainers/bf16.jsonnet')
            + { trainer+: { zero_stage: 1 } },
  sft_learning_rate: 1e-5,
  dpo_candidates: 500,
  checkpoints: { every: 10, keep_every: 40 },
  with_critic: { checkpoints: { every: 40, keep_every: 40 } },
};

// DeepSeekMath-7B on GPUs of 80 GB (the paper: eight).
local deepseek7b = {
  fragment: (import '../models/deepseek7b.jsonnet')
            + (import '../engines/vllm_per_gpu.jsonnet')
            + (import '../trainers/bf16.jsonnet')
            + {
              trainer+: { zero_stage: 2, sequences_per_micro_batch: 8 },
              engines+: { policy+: { max_num_seqs: 256 } },
            },
  sft_learning_rate: 5e-5,
  dpo_candidates: 450,
  checkpoints: { every: 10, keep_every: 60 },
  with_critic: { checkpoints: { every: 30, keep_every: 60 }, trainer+: { offload_optimizer: true } },
};

// The paper's fine-tuned weights of a model on each data set.
local fine_tuned(model, weights) = function(data) model {
  fragment+: { model+: { name_or_path: 'realtreetune/' + weights[data] } },
};

local models = {
  rho1b: function(data) rho1b,
  deepseek7b: function(data) deepseek7b,
  rho1bSft2: fine_tuned(rho1b, { GSM8K: 'rho-1b-sft-GSM8K', MATH: 'rho-1b-sft-MATH' }),
  deepseekSft2: fine_tuned(deepseek7b, { GSM8K: 'deepseekmath-7b-sft-GSM8K', MATH: 'deepseekmath-7b-sft-MATH-v2' }),
};

// 64 problems an iteration, 8 answers to each: 512 episodes, two epochs. A problem comes once in an iteration and may
// come again in the next. Advantages are whitened over the iteration's tokens (the paper's code: over each
// micro-batch, so that they change with the machine). The KL to the start model is the sum over an answer's tokens
// next to a policy term that is their mean: its coefficient was chosen for that. A minibatch whose mean ratio to the old
// policy is above 10 has no loss (the paper's code: each GPU's micro-batch).
local policy_gradient(model, data) = {
  rollout: sampling { samples: 8 },
  problems_per_iteration: 64,
  problem_sampling: 'between_iterations',
  iterations: data.iterations,
  checkpoints: model.checkpoints,
  trainer+: {
    objective+: {
      clip_low: 0.2,
      clip_high: 0.2,
      aggregation: 'token',
      kl_coef: 1e-4,
      kl_placement: 'loss',
      kl_estimator: 'k3',
      kl_clamp: [0, 10],
      kl_reduction: 'sequence_sum',
      ratio_threshold: 10,
    },
    advantage_normalisation: 'whiten',
    epochs: 2,
  },
};

local all_problems(samples) = {
  rollout: sampling { samples: samples },
  problems_per_iteration: null,
  problem_sampling: 'epochs',
  checkpoints: { every: 1, keep_every: 1 },
};

// The paper keeps a candidate every so many gradient steps, and the start weights; validation says which is taken.
local chosen_among(every, rule) = {
  local experiment = self,
  choose_checkpoint: {
    set: [one.name for one in experiment.evaluation.sets if one.split == 'validation'][0],
    every: every,
    rule: rule,
  },
};

local methods = {
  vineppo(model, data):: (import '../methods/vineppo.jsonnet') + policy_gradient(model, data)
                         + (import '../analyzers/value_accuracy.jsonnet')
                         + (import '../analyzers/advantage_distribution.jsonnet')
                         + (import '../analyzers/action_ranking.jsonnet')
                         + { credit+: data.max_states },

  ppo(model, data):: (import '../methods/ppo.jsonnet') + policy_gradient(model, data)
                     + (import '../analyzers/value_accuracy.jsonnet')
                     + (import '../analyzers/action_ranking.jsonnet')
                     + {
                       credit+: { critic+: { learning_rate: null, value_clip: 0.2 } },
                     } + model.with_critic,

  // The paper's GRPO and RLOO differ from its PPO in their credit alone.
  grpo(model, data):: (import '../methods/ppo_group_credit.jsonnet') + policy_gradient(model, data),
  rloo(model, data):: (import '../methods/ppo_rloo_credit.jsonnet') + policy_gradient(model, data),

  restem(model, data):: (import '../methods/restem.jsonnet') + all_problems(8)
                        + (import '../analyzers/kl_to_reference.jsonnet')
                        + { trainer+: { epochs: 8 }, iterations: 10 }
                        + chosen_among(500, 'first_maximum'),

  // One iteration on the start model's own answers. No KL but the loss's own. The paper picks the checkpoint by hand.
  dpo_positive(model, data):: (import '../methods/dpo_positive.jsonnet') + all_problems(64) + {
    selection+: { max_pairs_per_problem: 64 },
    trainer+: { objective+: { beta: data.dpo_beta, positive_penalty: 50.0, label_smoothing: 0.0 }, epochs: 3 },
    iterations: 1,
  } + chosen_among(model.dpo_candidates, 'best'),

  // What makes the start weights: two passes over the training problems' own solutions, each weighing the same.
  sft(model, data):: (import '../methods/sft.jsonnet') + {
    rollout+: { too_long: 'leave_out' },
    trainer+: { objective+: { aggregation: 'sequence' }, learning_rate: model.sft_learning_rate },
    iterations: 2,
    problems_per_iteration: null,
    problem_sampling: 'epochs',
    checkpoints: { every: 1, keep_every: 1 },
    evaluation+: { rollout: sampling },
  },
};

local named(what, all, name) =
  if std.objectHasAll(all, name) then all[name]
  else error 'there is no %s "%s": there are %s' % [what, name, std.join(', ', std.objectFieldsAll(all))];

function(model, method, data)
  local set = named('data set', data_sets, data);
  local start = named('model', models, model)(data);
  set.fragment + start.fragment + shared + named('method', methods, method)(start, set) + {
    experiment_name: if method == 'sft' then 'sft_%s_%s' % [model, data] else 'polIter_%s_%s_%s' % [model, method, data],
  }
