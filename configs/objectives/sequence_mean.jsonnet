// Every answer weighs the same, however long (GRPO, Shao et al., arXiv:2402.03300, eq. 3).
{ trainer+: { objective+: { aggregation: 'sequence', constant_length: null } } }
