// TensorBoard: `tensorboard --logdir experiments` shows the curves of all runs.
{ sinks+: [{ type: 'tensorboard' }] }
