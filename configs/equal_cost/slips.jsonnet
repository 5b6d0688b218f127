// Signposts that must all be right: GRPO from the start model. Another method goes on its right.
(import '../lib/equal_cost.libsonnet')('slips').on_policy
