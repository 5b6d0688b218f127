// VinePPO on five domains at once, with 3 continuations at every line.
(import 'tiny_rl.libsonnet')
+ (import '../methods/vineppo.jsonnet')
+ { experiment_name: 'domains/tiny_vineppo', credit+: { samples: 3 } }
