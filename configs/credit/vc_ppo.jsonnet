// VC-PPO: a critic that learns rewards, and a policy with λ = 0.95.
{ credit: { type: 'vapo', alpha: null, lam: 0.95 } }
