// One choice decides, the last of sixteen (lib/decisive.libsonnet): GRPO from the start model. Another method goes on its right.
(import '../lib/decisive.libsonnet')('last').on_policy
