local quickstart = import '../lib/quickstart.libsonnet';
quickstart.policy_gradient('dr_grpo', import '../presets/dr_grpo.jsonnet')
