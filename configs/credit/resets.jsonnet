// RRPO (Samanta et al., arXiv:2605.25507, by its abstract): each wrong answer is continued from a step drawn at random, in
// four ways, and only these continuations are trained.
(import '../rollouts/tree_resets.jsonnet') + { credit: { type: 'resets' } }
