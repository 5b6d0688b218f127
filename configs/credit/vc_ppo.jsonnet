// VC-PPO (Yuan et al., arXiv:2503.01491): a critic that learns rewards, and a policy with λ = 0.95.
{ credit: { type: 'vapo', alpha: null, lam: 0.95 } }
