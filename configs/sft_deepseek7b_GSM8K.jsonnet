// Supervised fine-tuning of DeepSeekMath-7B on GSM8K: the start of the polIter experiments, for those who make it themselves.
(import 'data_sets/GSM8K.jsonnet')
+ (import 'models/deepseek7b.jsonnet')
+ (import 'machines/deepseek7b.jsonnet')
+ (import 'methods/sft.jsonnet')
+ (import 'trainers/lr5e-5.jsonnet')
+ (import 'checkpoints/every1_keep1.jsonnet')
+ { experiment_name: 'sft_deepseek7b_GSM8K' }
