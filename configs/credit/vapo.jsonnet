// VAPO (arXiv:2504.05118): a critic that learns rewards, and a policy with λ = 1 − 1/(0.05 l) at an answer of l
// tokens.
{ credit: { type: 'vapo' } }
