// TRACE (Tao et al., arXiv:2607.13988): the group's advantage, and how much easier each step made the reference
// answer to predict. Set `lead_in` to the text after which the policy writes its results.
{ credit: { type: 'trace' } }
