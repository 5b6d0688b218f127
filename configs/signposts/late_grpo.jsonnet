// As late_vineppo.jsonnet with GRPO's credit, and nothing else changed.
(import '../lib/signposts.libsonnet')('late').policy_gradient('grpo', import '../methods/ppo_group_credit.jsonnet')
