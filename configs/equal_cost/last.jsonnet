// One choice decides, the last of sixteen (lib/decisive.libsonnet): GRPO from the start model. Other methods are appended to it.
(import '../lib/decisive.libsonnet')('last').on_policy
