// What the other answers through a state earned, topped up with continuations to three.
{ credit: { type: 'monte_carlo', samples: 3, values: { type: 'topped_up' } } }
