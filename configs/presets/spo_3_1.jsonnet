// "Exploring Paths" (SPO), section 3.1: towards the likeliest token, divided by the whole batch.
(import 'preset.libsonnet')('spo_3_1')
+ (import 'spo.libsonnet')
+ { trainer+: { objective+: { normalise_by: 'batch' } } }
