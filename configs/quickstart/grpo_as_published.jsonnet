// GRPO with its own loss and KL (grpo.jsonnet: VinePPO's experiment with GRPO's credit).
local quickstart = import '../lib/quickstart.libsonnet';
quickstart.policy_gradient('grpo_as_published', import '../presets/grpo_as_published.jsonnet')
