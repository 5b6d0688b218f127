// P-GRPO from the tiny model that learned from sequential demonstrations, with
// ThreadWeaver's reward as its published code has it.
(import 'rl_sequential.libsonnet')
+ (import '../../shaping/acceleration_published_code.jsonnet')
+ { experiment_name: 'threadweaver/tiny/rl_sequential_published' }
