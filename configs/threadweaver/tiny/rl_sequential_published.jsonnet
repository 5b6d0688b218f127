(import 'rl_sequential.libsonnet')
+ (import '../../shaping/acceleration_published_code.jsonnet')
+ { experiment_name: 'threadweaver/tiny/rl_sequential_published' }
