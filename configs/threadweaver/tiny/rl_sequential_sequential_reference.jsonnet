// P-GRPO from the tiny model that learned from sequential demonstrations, with
// a reward for what the critical path saves of the sequential solution.
(import 'rl_sequential.libsonnet')
+ (import '../../shaping/acceleration_sequential.jsonnet')
+ { experiment_name: 'threadweaver/tiny/rl_sequential_sequential_reference' }
