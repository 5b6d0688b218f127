// The quickstart with SPO, section 3.2 (configs/presets/spo_3_2.jsonnet).
(import '../lib/quickstart.libsonnet').correct_paths('spo_3_2', import '../presets/spo_3_2.jsonnet')
