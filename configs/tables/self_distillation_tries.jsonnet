// The tries of learning rates, on a seed that no table has, from which self_distillation.jsonnet took one for all methods.
(import 'self_distillation.libsonnet')(
  [101],
  { grpo: 'GRPO', opsd: 'OPSD, the policy teaches' },
  { name: 'self_distillation_tries', title: 'Tries of learning rates' },
  rates=['1e-4', '3e-4', '1e-3'],
)
