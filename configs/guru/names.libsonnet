// Guru's published runs: configs/guru/NAME.jsonnet is the field NAME.

// DAPO on one domain from Qwen2.5-7B.
{
  ['dapo_7b_' + domain]: (import 'dapo_7b.libsonnet')(domain) + { experiment_name: 'guru/dapo_7b_' + domain }
  for domain in (import 'domains.libsonnet').names
}
+ {
  // GRPO on all of Guru's domains from Qwen2.5-7B; published on four machines of eight GPUs.
  '7b_grpo': (import 'grpo.libsonnet')(import '../models/qwen2.5-7b.jsonnet') + { experiment_name: 'guru/7b_grpo' },

  // GRPO on all of Guru's domains from Qwen2.5-32B; published on sixteen machines of eight GPUs.
  '32b_grpo': (import 'grpo.libsonnet')(import '../models/qwen2.5-32b.jsonnet') + {
    experiment_name: 'guru/32b_grpo',
    trainer+: { sequence_parallel_size: 2, offload_optimizer: true },
  },
}
