// Signposts with wandering before those that decide: GRPO from the start model. Other methods are appended to it.
(import '../lib/equal_cost.libsonnet')('distraction').on_policy
