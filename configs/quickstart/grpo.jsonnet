// VinePPO's experiment with GRPO's credit, and nothing else changed. GRPO as published: grpo_as_published.jsonnet.
local quickstart = import '../lib/quickstart.libsonnet';
quickstart.policy_gradient('grpo', import '../methods/ppo_group_credit.jsonnet')
