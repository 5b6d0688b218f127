// One choice decides, the first of 32 (lib/decisive.libsonnet): GRPO from the start model. Another method goes on its right.
(import '../lib/decisive.libsonnet')('long').on_policy
