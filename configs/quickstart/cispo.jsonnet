// The quickstart with CISPO (configs/presets/cispo.jsonnet).
(import '../lib/quickstart.libsonnet').policy_gradient('cispo', import '../presets/cispo.jsonnet')
