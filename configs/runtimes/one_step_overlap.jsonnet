// Append it to a policy gradient: each iteration is sampled while the one before is trained, from weights that are one
// version old, and truncated importance weights correct for that.
(import '../objectives/importance_cap_2.jsonnet') + { overlap: 'one_step' }
