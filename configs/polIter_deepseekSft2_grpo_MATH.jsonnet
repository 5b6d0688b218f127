// PPO's loss with GRPO's credit on MATH, from DeepSeekMath-7B after supervised fine-tuning.
(import 'lib/experiment.libsonnet')('deepseekSft2', 'grpo', 'MATH')
