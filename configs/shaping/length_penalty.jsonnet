// The length reward of Kimi k1.5 (arXiv:2501.12599, section 2.3.3): among the answers to a problem, correct ones
// earn up to 0.5 more the nearer they are to the shortest of all, and the longest of all 0.5 less.
{ shaping+: [{ type: 'length_penalty', weight: 1.0 }] }
