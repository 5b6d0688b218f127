// GRPO's credit.
(import '../lib/hinted_sums.libsonnet').policy_gradient('grpo', import '../credit/group.jsonnet')
