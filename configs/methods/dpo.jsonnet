// DPO (Rafailov et al., arXiv:2305.18290): DPO-positive without the term that keeps the correct answers likely.
(import 'dpo_positive.jsonnet') + { trainer+: { objective+: { type: 'dpo' } } }
