// PPO's loss with GRPO's credit on GSM8K, from DeepSeekMath-7B after supervised fine-tuning.
(import 'lib/experiment.libsonnet')('deepseekSft2', 'grpo', 'GSM8K')
