// VinePPO's with three continuations a state.
{ credit: { type: 'monte_carlo', samples: 3 } }
