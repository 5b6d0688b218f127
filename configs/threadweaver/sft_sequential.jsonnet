// The same problems with the solutions of the baseline: one line after the other; each token sees all tokens before it.
(import 'sft.libsonnet')
+ {
  experiment_name: 'threadweaver/sft_sequential',
  task+: { form: 'sequential' },
  model+: { attention: 'sdpa' },
  evaluation+: { rollout+: { parallel: false } },
}
+ (import '../models/thread_tokens.jsonnet')
