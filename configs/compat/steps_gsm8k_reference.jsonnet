// GSM8K with the step boundaries of the paper's code, which count blank lines in the middle.
{ task+: { steps: { type: 'gsm8k_reference' } } }
