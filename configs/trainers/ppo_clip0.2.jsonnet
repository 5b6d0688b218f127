// The clipped policy gradient, two epochs, advantages whitened. The mean and deviation are those of the
// iteration's tokens; the paper's code takes them from each micro-batch, so that they change with the machine.
{
  trainer+: {
    objective+: { type: 'ppo', clip_low: 0.2, clip_high: 0.2, aggregation: 'token' },
    advantage_normalisation: 'whiten',
    epochs: 2,
  },
}
