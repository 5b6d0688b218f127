// P-GRPO from the tiny model that learned from demonstrations in parallel threads, with
// ThreadWeaver's reward as its published code has it.
(import 'rl_parallel.libsonnet')
+ (import '../../shaping/acceleration_published_code.jsonnet')
+ { experiment_name: 'threadweaver/tiny/rl_parallel_published' }
