// VinePPO with three continuations of each state, on the variant `every` of signposts.
(import '../lib/signposts.libsonnet')('every').policy_gradient('vineppo', import '../methods/vineppo.jsonnet')
+ { credit+: { samples: 3 } }
