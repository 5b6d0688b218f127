// SPO, section 3.2: towards the likeliest token, divided by the correct answers.
(import 'preset.libsonnet')('spo_3_2')
+ (import 'spo.libsonnet')
