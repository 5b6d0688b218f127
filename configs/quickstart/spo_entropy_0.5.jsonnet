// The quickstart with SPO with an entropy penalty of 0.5 (configs/presets/spo_entropy_0.5.jsonnet).
(import '../lib/quickstart.libsonnet').correct_paths('spo_entropy_0.5', import '../presets/spo_entropy_0.5.jsonnet')
