// As slips_vineppo.jsonnet with GRPO's credit, and nothing else changed.
(import '../lib/signposts.libsonnet')('slips').policy_gradient('grpo', import '../methods/ppo_group_credit.jsonnet')
