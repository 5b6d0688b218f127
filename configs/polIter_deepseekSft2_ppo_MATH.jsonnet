// PPO on MATH, from DeepSeekMath-7B after supervised fine-tuning.
(import 'data_sets/MATH.jsonnet')
+ (import 'models/deepseekSft2_MATH.jsonnet')
+ (import 'machines/deepseek7b.jsonnet')
+ (import 'methods/ppo.jsonnet')
+ (import 'checkpoints/every30_keep60.jsonnet')
+ (import 'trainers/offload_optimizer.jsonnet')
+ { experiment_name: 'polIter_deepseekSft2_ppo_MATH', iterations: 1000 }
