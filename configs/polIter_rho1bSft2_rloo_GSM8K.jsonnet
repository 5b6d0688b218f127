// PPO's loss with RLOO's credit on GSM8K, from Rho-1B after supervised fine-tuning.
(import 'lib/experiment.libsonnet')('rho1bSft2', 'rloo', 'GSM8K')
