// GRPO's advantages at the fifth of the tokens with the highest entropy: for benches, no run knows entropies.
{ credit: { type: 'forking_tokens', over: { type: 'group' } } }
