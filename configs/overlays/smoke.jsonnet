// Two small iterations on a CPU: append it to any experiment. These stay as they are: method, credit, objective,
// selection, grader, steps, schedule, layout, ZeRO stage. The size is reduced: the model is a tiny one with random
// weights over characters, and the data sets are sixteen problems of their format.
//
// Such a model is never right. So answers that are cut off earn the reward: about four in five of them, which
// gives every method something to learn from, right and wrong answers to compare among it.

local sampling = { samples: 4, max_tokens: 24, unfinished_reward: 1.0, max_prompt_tokens: null };

local few(rollout) =
  if rollout.type == 'demonstrations' then {}
  else if rollout.type == 'until_mixed' then { rollout+: few(rollout.rollout) }
  else sampling;

local problems(task) =
  local name = if task.type == 'gsm8k' then 'gsm8k' else 'math';
  local file = std.strReplace(std.thisFile, 'smoke.jsonnet', 'smoke_problems/' + name + '.jsonl');
  { train: [file], validation: [file], test: [file], validation_size: null }
  + (if std.objectHas(task, 'source') then { source: null } else {});

local has(object, key) = std.objectHas(object, key) && object[key] != null;
local small_evaluation(whole) = {
  sets: [
    set { problems: 2, samples: 2, max_tokens: 24 }
    + (if has(set, 'task') then { task+: problems(set.task) } else {})
    for set in whole.sets
  ],
  [if has(whole, 'rollout') then 'rollout']+: sampling,
};

{
  experiment_name+: '_smoke',
  // The file alone, without an experiment on its left, has no task, rollout, credit or evaluation.
  task+: if 'task' in super then problems(super.task) else {},
  model: {
    type: 'tiny',
    layers: 1,
    hidden_size: 64,
    heads: 2,
    intermediate_size: 96,
    context_length: $.context_length,
    alphabet: std.join('', [std.char(code) for code in [10] + std.range(32, 126) if std.char(code) != '<']),
  },
  context_length: 160,
  engines+: {
    policy: {
      type: 'vllm',
      dtype: 'float32',
      max_num_seqs: 64,
      max_num_batched_tokens: 2048,
      prefix_caching: false,
      start_timeout: 1800,  // on a machine that does much else
      sync_timeout: 900,
    },
  },
  rollout+: if 'rollout' in super then few(super.rollout) else {},
  credit+: if 'credit' in super && has(super.credit, 'samples') then { samples: 2 } else {},
  // A rate at which a sync that brought nothing is noticed, and the next answers are still of both kinds.
  trainer+: { precision: 'float32', learning_rate: 1e-4, minibatch_size: 8, tokens_per_micro_batch: 4096 },
  evaluation+: if 'evaluation' in super then small_evaluation(super.evaluation) else {},
  iterations: 2,
  problems_per_iteration: 8,
  checkpoints: { every: 1, keep_every: 1 },
  grader_workers: 1,
  sinks: [],
}
