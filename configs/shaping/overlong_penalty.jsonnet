// DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13): the last fifth of the budget costs up to 1, as the
// last 4096 of 20480 tokens do there.
local budget(rollout) = if rollout.type == 'until_mixed' then budget(rollout.rollout) else rollout.max_tokens;
{ shaping+: [{ type: 'overlong_penalty', cache: std.floor(budget($.rollout) / 5), scale: 1.0 }] }
