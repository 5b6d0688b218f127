// SPO with an entropy penalty of 0.1, in the setting of its code.
(import 'preset_on_GSM8K.libsonnet')(import '../presets/spo_entropy_0.1.jsonnet', 'spo_entropy_0.1')
