// Solutions with threads: each thread sees in training what it sees in sampling, without its siblings. Injected text
// is not trained, and tokens that parts of a solution share are computed once.
(import 'sft.libsonnet')
+ {
  experiment_name: 'threadweaver/sft_parallel',
  task+: { form: 'tree_digits' },
  model+: { attention: 'flex_attention' },
  trainer+: { layout: 'tree' },
}
+ (import '../models/thread_tokens.jsonnet')
