// MaxRL: reward minus the group's mean, divided by that mean: hard problems weigh more.
{ credit: { type: 'max_rl' } }
