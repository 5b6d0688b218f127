// RREDCoT's values (Ielanskyi et al., arXiv:2606.06475): the probability of the reference answer after each step.
// Nothing is sampled for it. Set `lead_in` to the text after which the policy writes its results.
{ credit: { type: 'monte_carlo', values: { type: 'rredcot' } } }
