// ORPO (Hong et al., arXiv:2403.07691): likelihood of the correct answers, the odds of both, and no reference.
(import 'dpo_positive.jsonnet') + { trainer+: { objective+: { type: 'orpo', beta: 0.1 } } }
