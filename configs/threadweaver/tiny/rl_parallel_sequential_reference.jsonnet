(import 'rl_parallel.libsonnet')
+ (import '../../shaping/acceleration_sequential.jsonnet')
+ { experiment_name: 'threadweaver/tiny/rl_parallel_sequential_reference' }
