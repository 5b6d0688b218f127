// The quickstart with SPO, section 3.3 (configs/presets/spo_3_3.jsonnet).
(import '../lib/quickstart.libsonnet').correct_paths('spo_3_3', import '../presets/spo_3_3.jsonnet')
