// Supervised fine-tuning of DeepSeekMath-7B on GSM8K: for those who make the start weights of polIter_* themselves.
(import 'lib/experiment.libsonnet')('deepseek7b', 'sft', 'GSM8K')
