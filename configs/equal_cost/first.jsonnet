// One choice decides, the first of sixteen (lib/decisive.libsonnet): GRPO from the start model. Another method goes on its right.
(import '../lib/decisive.libsonnet')('first').on_policy
