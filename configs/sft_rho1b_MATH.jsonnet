// Supervised fine-tuning of Rho-1B on MATH: for those who make the start weights of polIter_* themselves.
(import 'lib/experiment.libsonnet')('rho1b', 'sft', 'MATH')
