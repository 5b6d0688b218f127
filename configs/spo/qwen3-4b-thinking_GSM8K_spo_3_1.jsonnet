(import 'correct_paths.libsonnet')('spo_3_1', import '../presets/spo_3_1.jsonnet')
