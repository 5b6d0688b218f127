// PPO on GSM8K, from Rho-1B after supervised fine-tuning.
(import 'data_sets/GSM8K.jsonnet')
+ (import 'models/rho1bSft2_GSM8K.jsonnet')
+ (import 'machines/rho1b.jsonnet')
+ (import 'methods/ppo.jsonnet')
+ (import 'checkpoints/every40_keep40.jsonnet')
+ { experiment_name: 'polIter_rho1bSft2_ppo_GSM8K', iterations: 650 }
