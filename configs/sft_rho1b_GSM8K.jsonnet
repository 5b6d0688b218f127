// Supervised fine-tuning of Rho-1B on GSM8K: the start of the polIter experiments, for those who make it themselves.
(import 'data_sets/GSM8K.jsonnet')
+ (import 'models/rho1b.jsonnet')
+ (import 'machines/rho1b.jsonnet')
+ (import 'methods/sft.jsonnet')
+ (import 'trainers/lr1e-5.jsonnet')
+ (import 'checkpoints/every1_keep1.jsonnet')
+ { experiment_name: 'sft_rho1b_GSM8K' }
