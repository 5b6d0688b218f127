// A little for staying undecided, over trained tokens only (the single-file GRPO on Countdown: 0.001).
{ trainer+: { objective+: { entropy_coef: 0.001 } } }
