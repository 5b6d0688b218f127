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
local evaluation(paper) = {
  sets: [
    set + (if has(set, 'task') then { task+: prompt(set.task) } else {})
    for set in paper.sets
  ],
  [if has(paper, 'rollout') then 'rollout']+: single_turn(paper.rollout),
};

{
  // Without an experiment on its left, this file changes nothing but the model.
  task+: if 'task' in super then prompt(super.task) else {},
  rollout+: if 'rollout' in super then single_turn(super.rollout) else {},
  evaluation+: if 'evaluation' in super then evaluation(super.evaluation) else {},
}
