// VinePPO on GSM8K: values at the prompt and at the first 25 step boundaries; the few answers with more
// steps earn nothing after them.
{ credit: { type: 'monte_carlo', samples: 9, max_states: 26 } }
