// The SPO presets in the setting of their code: configs/spo/NAME.jsonnet is the field NAME.
local presets = {
  spo_3_1: import '../presets/spo_3_1.jsonnet',
  spo_3_2: import '../presets/spo_3_2.jsonnet',
  spo_3_3: import '../presets/spo_3_3.jsonnet',
  'spo_entropy_0.1': import '../presets/spo_entropy_0.1.jsonnet',
  spo_rank_jsd: import '../presets/spo_rank_jsd.jsonnet',
};

// 512 problems, one answer to each; 150 passes of some 14 steps over the training problems.
{
  ['qwen3-4b-thinking_GSM8K_' + name]: (import 'qwen3-4b-thinking_GSM8K.jsonnet') + presets[name] + {
    experiment_name: 'spo/qwen3-4b-thinking_GSM8K_' + name,
    rollout+: { samples: 1 },
    problems_per_iteration: 512,
    iterations: 2100,
  }
  for name in std.objectFields(presets)
}
