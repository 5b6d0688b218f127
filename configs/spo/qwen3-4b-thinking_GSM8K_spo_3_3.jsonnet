(import 'correct_paths.libsonnet')('spo_3_3', import '../presets/spo_3_3.jsonnet')
