// One choice decides, a step of its own before 24 free ones (lib/decisive.libsonnet): GRPO from the start model. Another method goes on its right.
(import '../lib/decisive.libsonnet')('alone').on_policy
