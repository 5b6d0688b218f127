// SPO, section 3.3, in the setting of its code.
(import 'preset_on_GSM8K.libsonnet')(import '../presets/spo_3_3.jsonnet', 'spo_3_3')
