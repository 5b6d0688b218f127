// VinePPO with three continuations of each state, on the variant `wandering` of signposts.
(import '../lib/signposts.libsonnet')('wandering').policy_gradient('vineppo', import '../methods/vineppo.jsonnet')
+ { credit+: { samples: 3 } }
