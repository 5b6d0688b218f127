// GRPO on all of Guru's domains from Qwen2.5-7B; published on four machines of eight GPUs.
(import 'grpo.libsonnet')(import '../models/qwen2.5-7b.jsonnet') + { experiment_name: 'guru/7b_grpo' }
