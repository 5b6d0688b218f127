// MaxRL (Tajwar et al., arXiv:2602.02710): reward minus the group's mean, divided by that mean: hard problems weigh
// more.
{ credit: { type: 'max_rl' } }
