// GRPO with eligibility traces over the tokens of an answer.
{ credit: { type: 'grpo_lambda' } }
