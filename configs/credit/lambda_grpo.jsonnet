// λ-GRPO (Sullivan, arXiv:2509.21154): GRPO in which a beginning that many answers share counts once.
{ credit: { type: 'lambda_grpo' } }
