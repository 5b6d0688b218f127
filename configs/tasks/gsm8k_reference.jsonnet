// GSM8K with the verdicts and steps of the VinePPO paper's code.
(import 'gsm8k.jsonnet') + {
  task+: {
    grader: { type: 'gsm8k_exact' },
    steps: { type: 'gsm8k_reference' },
  },
}
