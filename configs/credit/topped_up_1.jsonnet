// What the other answers through a state earned, topped up with continuations to one value at least.
{ credit: { type: 'monte_carlo', samples: 1, values: { type: 'topped_up' } } }
