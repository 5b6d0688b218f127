// Signposts with wandering before those that decide: GRPO from the start model. Another method goes on its right.
(import '../lib/equal_cost.libsonnet')('distraction').on_policy
