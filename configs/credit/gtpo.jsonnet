// GTPO (Tan et al., arXiv:2508.04349): GRPO's advantages, weighted by entropy among the answers with the same sign,
// and standardised for each sign.
{ credit: { type: 'weighted_by', over: { type: 'group' }, signal: 'entropy', weights: 'group_share', standardise: true } }
