// GRPO-λ (Parthasarathi et al., arXiv:2510.00194): GRPO with eligibility traces over the tokens of an answer.
{ credit: { type: 'grpo_lambda' } }
