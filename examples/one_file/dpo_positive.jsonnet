// The experiment of dpo_positive.py as a run of treetune. It ends with the same weights, bit for bit.
(import '../../configs/quickstart/dpo_positive.jsonnet')
+ (import 'small.libsonnet')
+ {
  iterations: 4,
  problems_per_iteration: 100,
  rollout+: { samples: 16 },
  trainer+: { epochs: 2 },
  choose_checkpoint: null,  // always the weights after the last epoch
}
