// The state to resume from every 40 iterations, weights for good every 40.
{ checkpoints: { every: 40, keep_every: 40 } }
