// VinePPO's experiment with RLOO's credit, and nothing else changed. RLOO as published: rloo_as_published.jsonnet.
local quickstart = import '../lib/quickstart.libsonnet';
quickstart.policy_gradient('rloo', import '../methods/ppo_rloo_credit.jsonnet')
