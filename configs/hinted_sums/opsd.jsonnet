// OPSD: the present policy with the answer in its prompt is the teacher. Rewards don't count.
(import '../lib/hinted_sums.libsonnet').self_distillation('opsd', {})
