// How many tokens an answer may have, whatever goes around the rollout that samples it.
local longest(rollout) = if rollout.type == 'until_mixed' then longest(rollout.rollout) else rollout.max_tokens;
longest
