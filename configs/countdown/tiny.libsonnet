// What the tiny Countdown experiments share.
(import '../tasks/countdown_tiny.jsonnet')
+ (import '../models/tiny.jsonnet')
+ (import '../engines/vllm_cpu.jsonnet')
+ (import '../evaluations/quickstart.jsonnet')
+ {
  type: 'policy_iteration',
  directory: 'experiments',
  seed: 1,
  evaluation+: { rollout: { type: 'single_turn', max_tokens: 96 } },
}
