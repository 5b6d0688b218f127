local quickstart = import '../lib/quickstart.libsonnet';
quickstart.policy_gradient('gspo', import '../presets/gspo.jsonnet')
