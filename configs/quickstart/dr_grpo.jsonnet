// The quickstart with Dr. GRPO (configs/presets/dr_grpo.jsonnet).
(import '../lib/quickstart.libsonnet').policy_gradient('dr_grpo', import '../presets/dr_grpo.jsonnet')
