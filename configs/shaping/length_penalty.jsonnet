// The length reward of Kimi k1.5 (arXiv:2501.12599, section 2.3.3): among the answers to a problem, the shortest
// right one earns 0.5 more and the longest of all 0.5 less.
{ shaping+: [{ type: 'length_penalty', weight: 1.0 }] }
