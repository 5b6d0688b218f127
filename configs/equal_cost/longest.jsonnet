// One choice decides, the first of 48 (lib/decisive.libsonnet): GRPO from the start model. Another method goes on its right.
(import '../lib/decisive.libsonnet')('longest').on_policy
