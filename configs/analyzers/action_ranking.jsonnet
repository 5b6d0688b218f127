// The better of two next steps, and the best of five, by values and in truth (256 rollouts each).
{ analyzers+: [{ type: 'action_ranking', rollouts: 256, samples: [1, 3, 9], alternatives: 5, states: 48 }] }
