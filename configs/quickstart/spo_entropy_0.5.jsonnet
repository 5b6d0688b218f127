local quickstart = import '../lib/quickstart.libsonnet';
quickstart.correct_paths('spo_entropy_0.5', import '../presets/spo_entropy_0.5.jsonnet')
