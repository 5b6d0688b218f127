// What answers earn in the single-file GRPO (CohleM/RL-GRPO): 0.01 for anything, 0.01 more for an expression of
// the given numbers, and 1 more where its value is correct. An answer that was cut off is graded like any other.
local as_graded(rollout) =
  local type = std.get(rollout, 'type', 'single_turn');
  if type == 'single_turn' then { unfinished_reward: null }
  else if type == 'until_mixed' then { rollout+: as_graded(rollout.rollout) }
  else {};
local has(object, key) = std.objectHas(object, key) && object[key] != null;

{
  task+: { grader+: { scores: { no_answer: 0.01, malformed: 0.01, wrong: 0.02, correct: 1.01 } } },
  rollout+: as_graded(if 'rollout' in super then super.rollout else {}),
  evaluation+:
    local whole = if 'evaluation' in super then super.evaluation else {};
    if has(whole, 'rollout') then { rollout+: as_graded(whole.rollout) } else {},
}
