// Qwen/Qwen3-4B-Thinking-2507, which only thinks: its chat template opens the thought, and the answer follows
// </think>. Append it to an experiment. Room for 8192 tokens of answer, as in the Exploring Paths runs, and for
// prompts of 384.
local tokens = 8192;
local longer(rollout) =
  if rollout.type == 'single_turn' then { max_tokens: tokens }
  else if rollout.type == 'until_mixed' then { rollout+: longer(rollout.rollout) }
  else {};
local behind_the_thought(task) =
  if task.grader.type == 'numeric'
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
        one
        + (if has(one, 'max_tokens') then { max_tokens: tokens } else {})
        + (if has(one, 'task') then { task+: behind_the_thought(one.task) } else {})
        for one in whole.sets
      ],
      [if has(whole, 'rollout') then 'rollout']+: longer(whole.rollout),
    },
  experiment_name+: '_qwen3-4b-thinking-2507',
}
