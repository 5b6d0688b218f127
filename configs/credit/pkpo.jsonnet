// The gradient of pass@4 without bias: what an answer adds to three others (PKPO).
{ credit: { type: 'pass_at_k', k: 4, baseline: 'without_answer', std: false } }
