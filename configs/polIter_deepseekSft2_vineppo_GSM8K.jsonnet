// VinePPO on GSM8K, from DeepSeekMath-7B after supervised fine-tuning.
(import 'lib/experiment.libsonnet')('deepseekSft2', 'vineppo', 'GSM8K')
