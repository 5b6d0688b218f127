// VinePPO with 3 continuations a state.
(import '../lib/signposts.libsonnet')('wandering').policy_gradient('vineppo', import '../methods/vineppo.jsonnet')
+ { credit+: { samples: 3 } }
