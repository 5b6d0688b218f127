// Monte-Carlo values (K = 1, 3, 9) and the critic against 256 rollouts, at the last checkpoint.
{ analyzers+: [{ type: 'value_accuracy', rollouts: 256, samples: [1, 3, 9], states: 128, prompts: 32 }] }
