// RLOO with its own loss and KL (rloo.jsonnet: VinePPO's experiment with RLOO's credit).
local quickstart = import '../lib/quickstart.libsonnet';
quickstart.policy_gradient('rloo_as_published', import '../presets/rloo_as_published.jsonnet')
