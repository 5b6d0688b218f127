// Optimiser state and gradients are dealt out over the ranks.
{ trainer+: { zero_stage: 2 } }
