(import 'correct_paths.libsonnet')('spo_entropy_0.1', import '../presets/spo_entropy_0.1.jsonnet')
