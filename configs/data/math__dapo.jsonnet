// DAPO-Math-17k: 17,917 problems, each of which its files hold a hundred times. The problem is within an instruction
// of its own, which is removed.
local lib = import 'lib.libsonnet';

lib.math {
  data_source: 'math__dapo',
  source: lib.hub('BytedTsinghua-SIA/DAPO-Math-17k'),
  prompt: '{{ prompt[0].content | found("(?s)answer to the problem[.]\\n\\n(.*)\\n\\nRemember to put your answer") }}',
  ground_truth: '{{ reward_model.ground_truth }}',
  extra_info: { id: 'extra_info.index' },
}
