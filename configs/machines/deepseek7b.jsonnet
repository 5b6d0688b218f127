// DeepSeekMath-7B on GPUs of 80 GB (the paper: eight): a smaller share for the server, since 14 GB of
// policy and its part of the optimiser state stay beside it.
(import '../engines/vllm_per_gpu.jsonnet')
+ (import '../trainers/bf16.jsonnet')
+ (import '../trainers/zero_2.jsonnet')
+ (import '../trainers/devBz8.jsonnet')
+ { engine+: { max_num_seqs: 256, gpu_memory_utilization: 0.5 } }
