// Prompts for models that were trained to chat, in place of the paper's, which a model learns in fine-tuning; a
// task with a prompt of its own keeps it. The template ends the answer, so no stop string does.
local boxed = '{problem}\n\nReason step by step, and put your final answer within \\boxed{}.';
local marked = '{problem}\n\nReason step by step, one step a line, and end with a line "#### " and the answer.';
local prompt(task) =
  if !std.startsWith(std.get(task, 'prompt', ''), '[MATH_TASK]') then {}
  else { prompt: if task.type == 'gsm8k' then marked else boxed };
local has(object, key) = std.objectHas(object, key) && object[key] != null;
local single_turn(rollout) =
  if rollout.type == 'single_turn' then { stop: [] }
  else if rollout.type == 'until_mixed' then { rollout+: single_turn(rollout.rollout) }
  else {};

{
  task+: prompt(super.task),
  rollout+: single_turn(super.rollout),
  evaluation+:
    local paper = super.evaluation;
    {
      sets: [
        one + (if has(one, 'task') then { task+: prompt(one.task) } else {})
        for one in paper.sets
      ],
      [if has(paper, 'rollout') then 'rollout']+: single_turn(paper.rollout),
    },
}
