// Rho-1B on GPUs of 80 GB (the paper: four).
(import '../engines/vllm_per_gpu.jsonnet')
+ (import '../trainers/bf16.jsonnet')
+ (import '../trainers/zero_1.jsonnet')
