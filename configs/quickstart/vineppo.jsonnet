// VinePPO with 3 continuations a state.
local quickstart = import '../lib/quickstart.libsonnet';
quickstart.policy_gradient('vineppo', import '../methods/vineppo.jsonnet') + { credit+: { samples: 3 } }
