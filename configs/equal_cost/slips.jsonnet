// Signposts that must all be right: a policy gradient from the start model. A method goes on its right.
(import '../lib/equal_cost.libsonnet')('slips').on_policy
