// PPO on MATH, from Rho-1B after supervised fine-tuning.
(import 'data_sets/MATH.jsonnet')
+ (import 'models/rho1bSft2_MATH.jsonnet')
+ (import 'machines/rho1b.jsonnet')
+ (import 'methods/ppo.jsonnet')
+ (import 'checkpoints/every40_keep40.jsonnet')
+ { experiment_name: 'polIter_rho1bSft2_ppo_MATH', iterations: 1000 }
