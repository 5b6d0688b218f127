(import 'rl_sequential.libsonnet')
+ (import '../../shaping/acceleration_sequential.jsonnet')
+ { experiment_name: 'threadweaver/tiny/rl_sequential_sequential_reference' }
