// VinePPO with three continuations of each state, on the variant `fork` of signposts.
(import '../lib/signposts.libsonnet')('fork').policy_gradient('vineppo', import '../methods/vineppo.jsonnet')
+ { credit+: { samples: 3 } }
