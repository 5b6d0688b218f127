// P-GRPO from each tiny start model with each reward: configs/threadweaver/tiny/NAME.jsonnet is the field NAME.
local starts = { parallel: import 'rl_parallel.libsonnet', sequential: import 'rl_sequential.libsonnet' };
local rewards = {
  published: import '../../shaping/acceleration_published_code.jsonnet',
  sequential_reference: import '../../shaping/acceleration_sequential.jsonnet',
};

{
  ['rl_%s_%s' % [form, reward]]: starts[form] + rewards[reward] + {
    experiment_name: 'threadweaver/tiny/rl_%s_%s' % [form, reward],
  }
  for form in std.objectFields(starts)
  for reward in std.objectFields(rewards)
}
