local quickstart = import '../lib/quickstart.libsonnet';
quickstart.correct_paths('spo_rank_jsd', import '../presets/spo_rank_jsd.jsonnet')
