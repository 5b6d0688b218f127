// Signposts that must all be right: GRPO from the start model. Other methods are appended to it.
(import '../lib/equal_cost.libsonnet')('slips').on_policy
