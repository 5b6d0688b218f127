(import 'rl_parallel.libsonnet')
+ (import '../../shaping/acceleration_published_code.jsonnet')
+ { experiment_name: 'threadweaver/tiny/rl_parallel_published' }
