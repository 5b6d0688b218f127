// VinePPO on GSM8K, from Rho-1B after supervised fine-tuning.
(import 'data_sets/GSM8K.jsonnet')
+ (import 'models/rho1bSft2_GSM8K.jsonnet')
+ (import 'machines/rho1b.jsonnet')
+ (import 'methods/vineppo.jsonnet')
+ (import 'credit/monte_carlo_9_of_26_states.jsonnet')
+ (import 'checkpoints/every10_keep40.jsonnet')
+ { experiment_name: 'polIter_rho1bSft2_vineppo_GSM8K', iterations: 650 }
