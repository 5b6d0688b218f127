// OPSD on whole distributions: the start model with the answer in its prompt is the teacher.
(import '../lib/hinted_sums.libsonnet').distribution_distillation('opsd_whole', { weights: 'reference' }, { divergence: 'reverse_kl' })
