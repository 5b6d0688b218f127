// KL to the start model in the loss, k3 (GRPO, arXiv:2402.03300, eq. 4; its coefficient).
{ trainer+: { objective+: { kl_coef: 0.04, kl_estimator: 'k3', kl_placement: 'loss' } } }
