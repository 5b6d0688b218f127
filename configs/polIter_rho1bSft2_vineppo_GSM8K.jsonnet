// VinePPO on GSM8K, from Rho-1B after supervised fine-tuning.
(import 'lib/experiment.libsonnet')('rho1bSft2', 'vineppo', 'GSM8K')
