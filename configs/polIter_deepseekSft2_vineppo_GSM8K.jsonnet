// VinePPO on GSM8K, from DeepSeekMath-7B after supervised fine-tuning.
(import 'data_sets/GSM8K.jsonnet')
+ (import 'models/deepseekSft2_GSM8K.jsonnet')
+ (import 'machines/deepseek7b.jsonnet')
+ (import 'methods/vineppo.jsonnet')
+ (import 'credit/monte_carlo_9_of_26_states.jsonnet')
+ (import 'checkpoints/every10_keep60.jsonnet')
+ { experiment_name: 'polIter_deepseekSft2_vineppo_GSM8K', iterations: 650 }
