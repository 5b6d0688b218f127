// preset_on_GSM8K(preset, name): an SPO preset in the setting of its code: 512 problems with one answer to each; 150
// passes of some 14 steps over the training problems.
function(preset, name) (import 'qwen3-4b-thinking_GSM8K.libsonnet') + preset + {
  experiment_name: 'spo/qwen3-4b-thinking_GSM8K_' + name,
  rollout+: { samples: 1 },
  problems_per_iteration: 512,
  iterations: 2100,
}
