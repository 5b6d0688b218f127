// The state to resume from every 30 iterations, weights for good every 60.
{ checkpoints: { every: 30, keep_every: 60 } }
