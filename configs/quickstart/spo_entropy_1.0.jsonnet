local quickstart = import '../lib/quickstart.libsonnet';
quickstart.correct_paths('spo_entropy_1.0', import '../presets/spo_entropy_1.0.jsonnet')
