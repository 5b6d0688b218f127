// DAPO's dynamic sampling (arXiv:2503.14476, section 3.2), around the rollout on the left: rounds of
// problems_per_iteration problems, at most ten, until as many groups have spread; trains on that many.
{
  // null where this file is evaluated alone, without an experiment on its left
  local sampled = if 'rollout' in super then super.rollout else null,
  local groups = std.get($, 'problems_per_iteration'),
  rollout: { type: 'until_mixed', rollout: sampled, groups: groups, max_rounds: 10 },
  selection: { type: 'mixed_groups', at_most: groups },
}
