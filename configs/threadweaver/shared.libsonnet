// What all experiments of ThreadWeaver share: its multiplication problems, Qwen3-8B asked in its chat template, eight
// answers to each held-out problem at temperature 1.
//
// Published is a context of 8,192 tokens for answers half as long (tasks/multiplication_5_to_8.jsonnet); this one has
// room for all but the very longest of ours.
local tokens = 16384;

(import '../runtimes/policy_iteration.jsonnet')
+ (import '../tasks/multiplication_5_to_8.jsonnet')
+ (import '../engines/vllm_per_gpu.jsonnet')
+ (import '../trainers/bf16.jsonnet')
+ (import '../hardware/zero_3_offload.jsonnet')
+ {
  model: {
    type: 'pretrained',
    name_or_path: 'Qwen/Qwen3-8B',
    dtype: 'bfloat16',
    chat: {},
  },
  context_length: tokens,
  // 8-fold sampling from the whole distribution; a problem's prompt has some 70 tokens.
  local threads = (import '../rollouts/parallel_threads.jsonnet') + {
    rollout+: { samples: 8, temperature: 1.0, top_p: 1.0, max_tokens: tokens, max_prompt_tokens: 512 },
  },
  rollout: threads.rollout,
  engines+: { policy+: { gpu_memory_utilization: 0.8 } },
  evaluation: {
    sets: [{ split: 'validation', samples: 8, temperature: 1.0, top_p: 1.0, while_training: true }],
  },
}
