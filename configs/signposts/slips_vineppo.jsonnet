// VinePPO with three continuations of each state, on the variant `slips` of signposts.
(import '../lib/signposts.libsonnet')('slips').policy_gradient('vineppo', import '../methods/vineppo.jsonnet')
+ { credit+: { samples: 3 } }
