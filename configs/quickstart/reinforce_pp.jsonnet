local quickstart = import '../lib/quickstart.libsonnet';
quickstart.policy_gradient('reinforce_pp', import '../presets/reinforce_pp.jsonnet')
