// How many tokens an answer may have, whatever goes around the rollout that samples it. null: there is no rollout, since
// a fragment is evaluated alone.
local longest(rollout) =
  if rollout == null then null
  else if std.member(['until_mixed', 'partial'], rollout.type) then longest(rollout.rollout)
  else rollout.max_tokens;
longest
