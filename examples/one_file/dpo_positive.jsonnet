// The same experiment as dpo_positive.py, composed of treetune's parts.
(import '../../configs/quickstart/dpo_positive.jsonnet')
+ (import 'small.libsonnet')
+ {
  iterations: 4,
  problems_per_iteration: 100,
  rollout+: { samples: 16 },
  trainer+: { epochs: 2 },
  choose_checkpoint: null,
}
