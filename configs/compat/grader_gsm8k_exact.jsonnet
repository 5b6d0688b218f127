// GSM8K with the verdicts of the paper's code: equal text, so that no answer equals a gold with a comma.
{ task+: { grader: { type: 'gsm8k_exact' } } }
