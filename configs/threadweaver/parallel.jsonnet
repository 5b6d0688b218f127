// ThreadWeaver: reinforcement learning of answers with threads, from the weights that sft_parallel.jsonnet makes.
(import 'rl.libsonnet')
+ {
  experiment_name: 'threadweaver/parallel',
  task+: { form: 'tree_digits' },
  model+: { name_or_path: $.directory + '/threadweaver/sft_parallel/checkpoints/last/policy' },
}
+ (import '../models/thread_tokens.jsonnet')
