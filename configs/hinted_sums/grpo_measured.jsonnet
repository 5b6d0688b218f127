// GRPO's credit, and the distance to the policy with the answer in its prompt, which doesn't influence training.
(import '../lib/hinted_sums.libsonnet').self_distillation('grpo_measured', { weight: 0, outcome_weight: 1 })
