// GRPO in which a beginning that many answers share counts once.
{ credit: { type: 'lambda_grpo' } }
