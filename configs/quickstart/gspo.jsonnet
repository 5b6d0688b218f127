// The quickstart with GSPO (configs/presets/gspo.jsonnet).
(import '../lib/quickstart.libsonnet').policy_gradient('gspo', import '../presets/gspo.jsonnet')
