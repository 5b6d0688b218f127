// Skywork-OR1's 105,055 problems. The answer is a JSON list, whose first item counts.
local lib = import 'lib.libsonnet';

lib.math {
  data_source: 'math__or1',
  source: lib.hub('Skywork/Skywork-OR1-RL-Data', train='math'),
  prompt: '{{ prompt[0].content }}',
  ground_truth: '{{ (reward_model.ground_truth | from_json)[0] }}',
}
