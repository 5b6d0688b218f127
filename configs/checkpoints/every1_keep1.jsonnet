// Everything after every iteration, weights for good.
{ checkpoints: { every: 1, keep_every: 1 } }
