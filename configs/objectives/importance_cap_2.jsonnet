// Truncated importance sampling: the engine samples from slightly other probabilities than the trainer
// computes, and the quotient, at most 2, weighs each token (Yao et al. 2025).
{ trainer+: { objective+: { importance_cap: 2.0 } } }
