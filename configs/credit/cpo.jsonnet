// CPO (Xu et al., arXiv:2607.14614): GRPO's advantage, shaped by how much likelier the reference answer in the prompt
// makes each token.
{ credit: { type: 'self_distillation', outcome_weight: 1.0, clip: 1.0, keeps_sign: true } }
