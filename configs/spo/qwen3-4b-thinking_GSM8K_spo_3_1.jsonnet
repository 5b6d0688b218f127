// SPO, section 3.1, in the setting of its code.
(import 'preset_on_GSM8K.libsonnet')(import '../presets/spo_3_1.jsonnet', 'spo_3_1')
