// DPO-positive on MATH, from Rho-1B after supervised fine-tuning.
(import 'lib/experiment.libsonnet')('rho1bSft2', 'dpo_positive', 'MATH')
