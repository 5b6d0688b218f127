// As fork_vineppo.jsonnet with GRPO's credit, and nothing else changed.
(import '../lib/signposts.libsonnet')('fork').policy_gradient('grpo', import '../methods/ppo_group_credit.jsonnet')
