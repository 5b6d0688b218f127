// VinePPO with three continuations of each state, on the variant `late` of signposts.
(import '../lib/signposts.libsonnet')('late').policy_gradient('vineppo', import '../methods/vineppo.jsonnet')
+ { credit+: { samples: 3 } }
