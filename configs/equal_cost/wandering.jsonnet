// Signposts with wandering behind the one that decides: GRPO from the start model. Another method goes on its right.
(import '../lib/equal_cost.libsonnet')('wandering').on_policy
