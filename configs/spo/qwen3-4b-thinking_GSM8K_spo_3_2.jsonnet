(import 'correct_paths.libsonnet')('spo_3_2', import '../presets/spo_3_2.jsonnet')
