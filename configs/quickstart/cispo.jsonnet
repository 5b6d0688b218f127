local quickstart = import '../lib/quickstart.libsonnet';
quickstart.policy_gradient('cispo', import '../presets/cispo.jsonnet')
