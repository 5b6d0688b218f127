// How many tokens an answer may have, whatever goes around the rollout that samples it.
local longest(rollout) = if std.member(['until_mixed', 'partial'], rollout.type) then longest(rollout.rollout) else rollout.max_tokens;
longest
