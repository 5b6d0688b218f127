// Noise of the gradient on minibatches of 16 episodes, at every checkpoint whose episodes are there.
{ analyzers+: [{ type: 'gradient_variance', checkpoints: 'all', minibatch_size: 16 }] }
