// RestEM on MATH, from DeepSeekMath-7B after supervised fine-tuning.
(import 'lib/experiment.libsonnet')('deepseekSft2', 'restem', 'MATH')
