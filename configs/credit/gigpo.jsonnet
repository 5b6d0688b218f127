// An answer in its group, and each turn among all that followed the same words of an environment.
{ credit: { type: 'gigpo' } }
