// SimPO (Meng et al., arXiv:2405.14734): mean log-probs of both answers, a margin, and no reference.
(import 'dpo_positive.jsonnet') + { trainer+: { objective+: { type: 'simpo', beta: 2.0, gamma: 1.0 } } }
