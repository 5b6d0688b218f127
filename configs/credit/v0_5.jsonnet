// A baseline between the group's mean and what a critic says of the prompt.
{ credit: { type: 'v0_5' } }
