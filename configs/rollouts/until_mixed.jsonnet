// DAPO's dynamic sampling (arXiv:2503.14476, section 3.2), around the rollout on the left: rounds of
// problems_per_iteration problems, at most ten, until as many groups have spread; trains on that many.
{
  local sampled = super.rollout,
  rollout: { type: 'until_mixed', rollout: sampled, groups: $.problems_per_iteration, max_rounds: 10 },
  selection: { type: 'mixed_groups', at_most: $.problems_per_iteration },
}
