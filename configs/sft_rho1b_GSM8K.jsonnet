// Supervised fine-tuning of Rho-1B on GSM8K: for those who make the start weights of polIter_* themselves.
(import 'lib/experiment.libsonnet')('rho1b', 'sft', 'GSM8K')
