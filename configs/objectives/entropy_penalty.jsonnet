// The opposite sign: the policy gets surer as it learns ("Exploring Paths", section 4.2).
{ trainer+: { objective+: { entropy_coef: -0.1 } } }
