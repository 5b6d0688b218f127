// Holds the mean entropy near 0.2 nats: the coefficient rises while there is less, and never falls below 0.
{ trainer+: { entropy_target: { target: 0.2, rate: 1e-3, lowest: 0.0, highest: 0.05 } } }
