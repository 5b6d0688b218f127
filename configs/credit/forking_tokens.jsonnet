// Forking tokens (Wang et al., arXiv:2506.01939): GRPO's advantages at the fifth of the tokens with the highest
// entropy, which the trainer computes.
{ credit: { type: 'forking_tokens', over: { type: 'group' } } }
