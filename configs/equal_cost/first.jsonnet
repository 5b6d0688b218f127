// One choice decides, the first of sixteen (lib/decisive.libsonnet): GRPO from the start model. Other methods are appended to it.
(import '../lib/decisive.libsonnet')('first').on_policy
