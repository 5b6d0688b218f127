// RLOO on MATH, from DeepSeekMath-7B after supervised fine-tuning.
(import 'data_sets/MATH.jsonnet')
+ (import 'models/deepseekSft2_MATH.jsonnet')
+ (import 'machines/deepseek7b.jsonnet')
+ (import 'methods/rloo.jsonnet')
+ (import 'checkpoints/every10_keep60.jsonnet')
+ { experiment_name: 'polIter_deepseekSft2_rloo_MATH', iterations: 1000 }
