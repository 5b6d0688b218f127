// No server: each rank samples in its own process, with PyTorch. For tiny models and trials: put it on the right.
{ engines+: { policy: { type: 'in_process' } } }
