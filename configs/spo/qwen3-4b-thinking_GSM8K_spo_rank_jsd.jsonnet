// SPO towards ranks, with Jensen–Shannon divergence, in the setting of its code.
(import 'preset_on_GSM8K.libsonnet')(import '../presets/spo_rank_jsd.jsonnet', 'spo_rank_jsd')
