// PPO on GSM8K, from DeepSeekMath-7B after supervised fine-tuning.
(import 'data_sets/GSM8K.jsonnet')
+ (import 'models/deepseekSft2_GSM8K.jsonnet')
+ (import 'machines/deepseek7b.jsonnet')
+ (import 'methods/ppo.jsonnet')
+ (import 'checkpoints/every30_keep60.jsonnet')
+ (import 'trainers/offload_optimizer.jsonnet')
+ { experiment_name: 'polIter_deepseekSft2_ppo_GSM8K', iterations: 650 }
