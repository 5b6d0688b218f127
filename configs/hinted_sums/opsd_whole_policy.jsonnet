// OPSD on whole distributions: the present policy with the answer in its prompt is the teacher.
(import '../lib/hinted_sums.libsonnet').distribution_distillation('opsd_whole_policy', { weights: 'policy' }, { divergence: 'reverse_kl' })
