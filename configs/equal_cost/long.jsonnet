// One choice decides, the first of 32 (lib/decisive.libsonnet): GRPO from the start model. Other methods are appended to it.
(import '../lib/decisive.libsonnet')('long').on_policy
