// The start model of the sequential baselines: as many of the same solutions, their lines one after the other.
(import 'base.libsonnet')
+ (import 'sft.libsonnet')
+ {
  experiment_name: 'threadweaver/tiny/sft_sequential',
  task+: { form: 'sequential' },
  evaluation+: { rollout+: { parallel: false } },
}
