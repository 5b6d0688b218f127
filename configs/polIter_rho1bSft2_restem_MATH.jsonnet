// RestEM on MATH, from Rho-1B after supervised fine-tuning.
(import 'data_sets/MATH.jsonnet')
+ (import 'models/rho1bSft2_MATH.jsonnet')
+ (import 'machines/rho1b.jsonnet')
+ (import 'methods/restem.jsonnet')
+ (import 'checkpoints/every1_keep1.jsonnet')
+ { experiment_name: 'polIter_rho1bSft2_restem_MATH' }
