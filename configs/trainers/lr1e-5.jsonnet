// The rate of supervised fine-tuning, Rho-1B.
{ trainer+: { learning_rate: 1e-5 } }
