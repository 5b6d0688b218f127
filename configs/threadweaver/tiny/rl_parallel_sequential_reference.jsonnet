// P-GRPO from the tiny model that learned from demonstrations in parallel threads, with
// a reward for what the critical path saves of the sequential solution.
(import 'rl_parallel.libsonnet')
+ (import '../../shaping/acceleration_sequential.jsonnet')
+ { experiment_name: 'threadweaver/tiny/rl_parallel_sequential_reference' }
