(import 'correct_paths.libsonnet')('spo_rank_jsd', import '../presets/spo_rank_jsd.jsonnet')
