// Solutions with threads: each thread is learnt behind what it will be sampled behind, siblings out of sight and
// injected text untrained; what parts of a solution have in common is computed once.
(import 'sft.libsonnet')
+ {
  experiment_name: 'threadweaver/sft_parallel',
  task+: { form: 'tree_digits' },
  model+: { attention: 'flex_attention' },
  trainer+: { layout: 'tree' },
}
+ (import '../models/thread_tokens.jsonnet')
