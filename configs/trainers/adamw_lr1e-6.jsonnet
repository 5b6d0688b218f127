// The VinePPO paper's optimiser: AdamW, 64 sequences a step, 3 % warm-up from 0, then linear decay to 0 at
// the run's last step. (compat/warmup_deepspeed.jsonnet has the warm-up that its code really ran.)
{
  trainer+: {
    type: 'deepspeed',
    learning_rate: 1e-6,
    schedule: { type: 'warmup', ratio: 0.03, decay: 'linear' },
    adam_betas: [0.9, 0.999],
    adam_eps: 1e-8,
    weight_decay: 0.0,
    max_grad_norm: 1.0,
    minibatch_size: 64,
  },
}
