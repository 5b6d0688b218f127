// What the other answers through a state earned (TEMPO's values): nothing is sampled for it.
{ credit: { type: 'monte_carlo', values: { type: 'siblings' } } }
