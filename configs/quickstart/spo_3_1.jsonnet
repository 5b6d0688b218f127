local quickstart = import '../lib/quickstart.libsonnet';
quickstart.correct_paths('spo_3_1', import '../presets/spo_3_1.jsonnet')
