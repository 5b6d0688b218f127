// OPSD: the start model with the answer in its prompt is the teacher. Rewards don't count.
(import '../lib/hinted_sums.libsonnet').self_distillation('opsd_start_teacher', { scorer: 'reference' })
+ { trainer+: { measure_kl: true } }
