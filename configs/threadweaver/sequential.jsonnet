// ThreadWeaver's baseline: the same from the weights that sft_sequential.jsonnet makes, each answer one completion.
// The reward is the same, too; without threads there is nothing to gain but the correct answer.
(import 'rl.libsonnet')
+ {
  experiment_name: 'threadweaver/sequential',
  task+: { form: 'sequential' },
  model+: { name_or_path: $.directory + '/threadweaver/sft_sequential/checkpoints/last/policy' },
  rollout+: { parallel: false },
}
+ (import '../models/thread_tokens.jsonnet')
