// GRPO on GSM8K with Qwen2.5-1.5B-Instruct, which may run Python between the parts of its answer.
(import '../polIter_rho1bSft2_grpo_GSM8K.jsonnet')
+ (import '../models/qwen2.5-1.5b-instruct.jsonnet')
+ (import '../rollouts/python_tool.jsonnet')
+ { experiment_name: 'multi_turn/qwen2.5-1.5b-instruct_python_GSM8K' }
