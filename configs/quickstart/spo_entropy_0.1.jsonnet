// The quickstart with SPO with an entropy penalty of 0.1 (configs/presets/spo_entropy_0.1.jsonnet).
(import '../lib/quickstart.libsonnet').correct_paths('spo_entropy_0.1', import '../presets/spo_entropy_0.1.jsonnet')
