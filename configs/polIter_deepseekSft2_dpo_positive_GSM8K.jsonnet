// DPO-positive on GSM8K, from DeepSeekMath-7B after supervised fine-tuning.
(import 'data_sets/GSM8K.jsonnet')
+ (import 'models/deepseekSft2_GSM8K.jsonnet')
+ (import 'machines/deepseek7b.jsonnet')
+ (import 'methods/dpo_positive.jsonnet')
+ (import 'trainers/dpo_b_0.3.jsonnet')
+ (import 'checkpoints/every1_keep1.jsonnet')
+ { experiment_name: 'polIter_deepseekSft2_dpo_positive_GSM8K' }
