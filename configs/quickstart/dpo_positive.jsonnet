// DPO-positive: 64 answers to each of 200 problems, as many in all as the policy gradients sample; at most 16
// pairs of a right one and a wrong one to a problem. Validation says how many epochs are good.
(import 'from_sft.jsonnet')
+ {
  experiment_name: 'quickstart/dpo_positive',
  rollout+: { samples: 64 },
  iterations: 1,
  problems_per_iteration: 200,
  credit: { type: 'none' },
  selection: { type: 'preference_pairs', max_pairs_per_problem: 16 },
  trainer: {
    type: 'deepspeed',
    objective: { type: 'dpo_positive', beta: 0.3, positive_penalty: 5 },
    learning_rate: 2e-4,
    schedule: { type: 'warmup', steps: 10 },
    minibatch_size: 64,
    epochs: 4,
    tokens_per_micro_batch: 8192,
  },
  choose_checkpoint: { set: 'validation', rule: 'best' },
}
