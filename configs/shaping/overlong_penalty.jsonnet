// DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13): the last fifth of the budget costs more and more, as
// the last 4096 of 20480 tokens do there. All of it is half of what lies between right and wrong: 1 of 2 there, where
// wrong is -1; 0.5 of 1 here, where it is 0.
local longest = import '../rollouts/longest_answer.libsonnet';
local cache(length) = if length == null then null else std.floor(length / 5);
{ shaping+: [{ type: 'overlong_penalty', cache: cache(longest(std.get($, 'rollout'))), scale: 0.5 }] }
