// Supervised fine-tuning of DeepSeekMath-7B on MATH: for those who make the start weights of polIter_* themselves.
(import 'lib/experiment.libsonnet')('deepseek7b', 'sft', 'MATH')
