// PPO with a critic that learns by classification over bins of returns (HL-Gauss, Farebrother et al., arXiv:2403.03950).
{ credit: { type: 'gae', critic: { loss: { type: 'hl_gauss' } } } }
