// VinePPO with three continuations of each state, on the variant `repair` of signposts.
(import '../lib/signposts.libsonnet')('repair').policy_gradient('vineppo', import '../methods/vineppo.jsonnet')
+ { credit+: { samples: 3 } }
