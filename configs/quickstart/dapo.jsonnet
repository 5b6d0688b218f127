local quickstart = import '../lib/quickstart.libsonnet';
quickstart.policy_gradient('dapo', import '../presets/dapo.jsonnet')
