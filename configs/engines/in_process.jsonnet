// No server: each rank samples in its own process, with PyTorch. For tiny models and trials: append it to an experiment.
{ engines+: { policy: { type: 'in_process' } } }
