// PKPO (Walder & Karkhanis, arXiv:2505.15201): the gradient of pass@4 without bias: the change that an answer makes
// to the best of three others.
{ credit: { type: 'pass_at_k', k: 4, baseline: 'without_answer', std: false } }
