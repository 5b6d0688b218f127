// RLOO: reward less the mean of the other answers.
{ credit: { type: 'rloo' } }
