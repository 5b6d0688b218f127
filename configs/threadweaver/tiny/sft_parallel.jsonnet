// The start model of the parallel experiments: from random weights, on solutions in threads.
(import 'base.libsonnet')
+ (import 'sft.libsonnet')
+ { experiment_name: 'threadweaver/tiny/sft_parallel' }
