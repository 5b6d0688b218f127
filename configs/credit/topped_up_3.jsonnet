// treetune's own: the mean reward of the other answers through a state, topped up with continuations to three
// rewards.
{ credit: { type: 'monte_carlo', samples: 3, values: { type: 'topped_up' } } }
