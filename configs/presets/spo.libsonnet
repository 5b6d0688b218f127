// Shared by all of "Exploring Paths" (SPO): correct answers alone, no credit. The target is constant; in the
// reference's code it moves: compat/spo_moving_target.jsonnet.
{
  credit: { type: 'none' },
  selection: { type: 'all' },  // the objective leaves wrong answers out, and knows how many there were
  trainer+: {
    objective: { type: 'spo', target: 'max', divergence: 'kl', loss_on: 'correct', normalise_by: 'correct' },
    advantage_normalisation: 'none',
  },
}
