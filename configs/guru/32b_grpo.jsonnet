// GRPO on all of Guru's domains from Qwen2.5-32B; published on sixteen machines of eight GPUs.
(import 'grpo.libsonnet')(import '../models/qwen2.5-32b.jsonnet') + {
  experiment_name: 'guru/32b_grpo',
  trainer+: { sequence_parallel_size: 2, offload_optimizer: true },
}
