// The state to resume from every 10 iterations, weights for good every 40.
{ checkpoints: { every: 10, keep_every: 40 } }
