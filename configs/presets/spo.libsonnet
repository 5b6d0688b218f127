// What "Exploring Paths" (SPO) shares: correct answers alone, no credit. The target stands still; the
// reference lets it move: compat/spo_moving_target.jsonnet.
{
  credit: { type: 'none' },
  selection: { type: 'all' },  // the objective leaves wrong answers out, and knows how many there were
  trainer+: {
    objective: { type: 'spo', target: 'max', divergence: 'kl', loss_on: 'correct', normalise_by: 'correct' },
    advantage_normalisation: 'none',
  },
}
