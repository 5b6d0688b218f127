// RestEM on MATH, from DeepSeekMath-7B after supervised fine-tuning.
(import 'data_sets/MATH.jsonnet')
+ (import 'models/deepseekSft2_MATH.jsonnet')
+ (import 'machines/deepseek7b.jsonnet')
+ (import 'methods/restem.jsonnet')
+ (import 'checkpoints/every1_keep1.jsonnet')
+ { experiment_name: 'polIter_deepseekSft2_restem_MATH' }
