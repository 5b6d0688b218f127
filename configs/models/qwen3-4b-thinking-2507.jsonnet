// Qwen/Qwen3-4B-Thinking-2507, which only thinks: its chat template opens the thought, and the answer follows
// </think>. Append it to an experiment. Room for 8192 tokens of answer, as in the Exploring Paths runs, and for
// prompts of 384.
local tokens = 8192;
// Tasks and rollouts are empty where this file is evaluated alone, without an experiment on its left.
local longer(rollout) =
  local type = std.get(rollout, 'type');
  if type == 'single_turn' then { max_tokens: tokens }
  else if type == 'until_mixed' then { rollout+: longer(rollout.rollout) }
  else {};
local behind_the_thought(task) =
  if std.objectHas(task, 'grader') && task.grader.type == 'numeric'
  then { grader+: { think_end: '</think>', require_think_end: true, without_marker: 'boxed' } }
  else {};
local has(object, key) = std.objectHas(object, key) && object[key] != null;

(import 'asked_in_chat.libsonnet')
+ {
  model: {
    type: 'pretrained',
    name_or_path: 'Qwen/Qwen3-4B-Thinking-2507',
    dtype: 'bfloat16',
    attention: 'sdpa',
    chat: {},
  },
  context_length: tokens + 384,
  task+: behind_the_thought(super.task),
  rollout+: longer(super.rollout),
  evaluation+:
    local whole = super.evaluation;
    {
      sets: [
        set
        + (if has(set, 'max_tokens') then { max_tokens: tokens } else {})
        + (if has(set, 'task') then { task+: behind_the_thought(set.task) } else {})
        for set in std.get(whole, 'sets', [])
      ],
      [if has(whole, 'rollout') then 'rollout']+: longer(whole.rollout),
    },
  experiment_name+: '_qwen3-4b-thinking-2507',
}
