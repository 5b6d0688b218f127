// VinePPO with 3 continuations a state.
(import '../lib/signposts.libsonnet')('repair').policy_gradient('vineppo', import '../methods/vineppo.jsonnet')
+ { credit+: { samples: 3 } }
