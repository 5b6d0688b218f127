// DPO-positive on MATH, from DeepSeekMath-7B after supervised fine-tuning.
(import 'data_sets/MATH.jsonnet')
+ (import 'models/deepseekSft2_MATH.jsonnet')
+ (import 'machines/deepseek7b.jsonnet')
+ (import 'methods/dpo_positive.jsonnet')
+ (import 'trainers/dpo_b_0.1.jsonnet')
+ (import 'checkpoints/every1_keep1.jsonnet')
+ { experiment_name: 'polIter_deepseekSft2_dpo_positive_MATH' }
