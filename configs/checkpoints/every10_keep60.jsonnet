// The state to resume from every 10 iterations, weights for good every 60.
{ checkpoints: { every: 10, keep_every: 60 } }
