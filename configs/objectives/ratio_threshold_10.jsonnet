// No loss where a minibatch's mean ratio to the old policy is above 10: a guard that the VinePPO paper's runs have.
{ trainer+: { objective+: { ratio_threshold: 10 } } }
