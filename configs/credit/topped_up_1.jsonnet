// treetune's own: the mean reward of the other answers through a state, topped up with continuations to at least one
// reward.
{ credit: { type: 'monte_carlo', samples: 1, values: { type: 'topped_up' } } }
