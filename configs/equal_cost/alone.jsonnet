// One choice decides, a step of its own before 24 free ones (lib/decisive.libsonnet): GRPO from the start model. Other methods are appended to it.
(import '../lib/decisive.libsonnet')('alone').on_policy
