// The quickstart with presets of the literature: configs/quickstart/NAME.jsonnet is the field NAME, made from
// configs/presets/NAME.jsonnet; and `siblings`, credit from what is trained on
// anyway (docs/results/credit_training.md).
local quickstart = import '../lib/quickstart.libsonnet';
local policy_gradient = {
  cispo: import '../presets/cispo.jsonnet',
  dapo: import '../presets/dapo.jsonnet',
  dr_grpo: import '../presets/dr_grpo.jsonnet',
  gspo: import '../presets/gspo.jsonnet',
  reinforce_pp: import '../presets/reinforce_pp.jsonnet',
};
local correct_paths = {
  spo_3_1: import '../presets/spo_3_1.jsonnet',
  spo_3_2: import '../presets/spo_3_2.jsonnet',
  spo_3_3: import '../presets/spo_3_3.jsonnet',
  'spo_entropy_0.1': import '../presets/spo_entropy_0.1.jsonnet',
  'spo_entropy_0.5': import '../presets/spo_entropy_0.5.jsonnet',
  'spo_entropy_1.0': import '../presets/spo_entropy_1.0.jsonnet',
  spo_rank_jsd: import '../presets/spo_rank_jsd.jsonnet',
};

{ siblings: quickstart.policy_gradient('siblings', (import '../methods/ppo_loss.jsonnet') + (import '../credit/siblings.jsonnet')) }
+ { [name]: quickstart.policy_gradient(name, policy_gradient[name]) for name in std.objectFields(policy_gradient) }
+ { [name]: quickstart.correct_paths(name, correct_paths[name]) for name in std.objectFields(correct_paths) }
