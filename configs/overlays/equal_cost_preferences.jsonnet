// One iteration that is the whole budget: 64 answers to each problem, at most 16 pairs of a correct one and a wrong one to a
// problem. Validation says how many epochs are good.
{
  rollout+: { samples: 64 },
  problems_per_iteration: 26,
  iterations: 1,
  selection+: { max_pairs_per_problem: 16 },
  trainer+: {
    objective+: { beta: 0.3, positive_penalty: 5 },
    schedule: { type: 'warmup', steps: 10 },
    minibatch_size: 64,
    epochs: 4,
    measure_kl: true,
  },
  choose_checkpoint: { set: 'validation', rule: 'best' },
}
