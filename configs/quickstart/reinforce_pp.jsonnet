// The quickstart with REINFORCE++ (configs/presets/reinforce_pp.jsonnet).
(import '../lib/quickstart.libsonnet').policy_gradient('reinforce_pp', import '../presets/reinforce_pp.jsonnet')
