// VinePPO with three continuations of each state, on the variant `coin` of signposts.
(import '../lib/signposts.libsonnet')('coin').policy_gradient('vineppo', import '../methods/vineppo.jsonnet')
+ { credit+: { samples: 3 } }
