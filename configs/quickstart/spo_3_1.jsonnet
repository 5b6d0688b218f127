// The quickstart with SPO, section 3.1 (configs/presets/spo_3_1.jsonnet).
(import '../lib/quickstart.libsonnet').correct_paths('spo_3_1', import '../presets/spo_3_1.jsonnet')
