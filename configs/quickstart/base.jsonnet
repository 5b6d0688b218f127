// What the quickstart's experiments share.
(import '../tasks/addition_chain.jsonnet')
+ (import '../models/tiny.jsonnet')
+ (import '../engines/vllm_cpu.jsonnet')
+ (import '../evaluations/quickstart.jsonnet')
+ {
  type: 'policy_iteration',
  directory: 'experiments',
  seed: 1,
  selection: { type: 'all' },
}
