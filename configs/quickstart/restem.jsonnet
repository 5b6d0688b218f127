// RestEM: five times the right ones of 2560 answers, from the SFT weights anew; as many answers in all as the
// policy gradients sample. Validation says how many epochs are good.
(import 'from_sft.jsonnet')
+ {
  experiment_name: 'quickstart/restem',
  iterations: 5,
  problems_per_iteration: 320,
  credit: { type: 'none' },
  selection: { type: 'correct_only', max_per_problem: 10 },
  trainer: {
    type: 'deepspeed',
    objective: { type: 'mle', aggregation: 'sequence' },
    learning_rate: 1e-3,
    schedule: { type: 'warmup', steps: 10, decay: 'linear' },
    minibatch_size: 64,
    epochs: 3,
    tokens_per_micro_batch: 8192,
  },
  restart: 'every_iteration',
  choose_checkpoint: { set: 'validation', rule: 'best' },
  evaluation+: { every: 1 },
}
