// The quickstart with DAPO (configs/presets/dapo.jsonnet).
(import '../lib/quickstart.libsonnet').policy_gradient('dapo', import '../presets/dapo.jsonnet')
