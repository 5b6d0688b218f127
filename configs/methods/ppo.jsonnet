// PPO (Schulman et al., arXiv:1707.06347): a critic as large as the policy, generalised advantages with γ = λ = 1.
(import 'ppo_loss.jsonnet')
+ { credit: { type: 'gae', gamma: 1.0, lam: 1.0 } }
