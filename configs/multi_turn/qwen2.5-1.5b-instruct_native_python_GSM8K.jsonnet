// GRPO on GSM8K with Qwen2.5-1.5B-Instruct, which calls Python as it was trained to call tools.
(import '../polIter_rho1bSft2_grpo_GSM8K.jsonnet')
+ (import '../models/qwen2.5-1.5b-instruct.jsonnet')
+ (import '../rollouts/native_python.jsonnet')
+ { experiment_name: 'multi_turn/qwen2.5-1.5b-instruct_native_python_GSM8K' }
