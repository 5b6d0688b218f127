// Signposts of which the first decides: a policy gradient from the start model. A method goes on its right.
(import '../lib/equal_cost.libsonnet')('fork').on_policy
