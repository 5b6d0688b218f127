// PPO: a critic's values, γ = λ = 1.
{ credit: { type: 'gae', gamma: 1.0, lam: 1.0 } }
