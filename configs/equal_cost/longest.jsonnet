// One choice decides, the first of 48 (lib/decisive.libsonnet): GRPO from the start model. Other methods are appended to it.
(import '../lib/decisive.libsonnet')('longest').on_policy
