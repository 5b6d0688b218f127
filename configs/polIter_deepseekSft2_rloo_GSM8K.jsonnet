// PPO's loss with RLOO's credit on GSM8K, from DeepSeekMath-7B after supervised fine-tuning.
(import 'lib/experiment.libsonnet')('deepseekSft2', 'rloo', 'GSM8K')
