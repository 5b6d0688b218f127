// TEMPO (Tran et al., arXiv:2509.18314): GRPO, and the change of the mean reward where answers part.
{ credit: { type: 'tempo' } }
