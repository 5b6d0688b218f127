// Signposts of which the first decides: GRPO from the start model. Another method goes on its right.
(import '../lib/equal_cost.libsonnet')('fork').on_policy
