// The quickstart with SPO with an entropy penalty of 1 (configs/presets/spo_entropy_1.0.jsonnet).
(import '../lib/quickstart.libsonnet').correct_paths('spo_entropy_1.0', import '../presets/spo_entropy_1.0.jsonnet')
