// "Exploring Paths" (SPO), section 3.2: towards the likeliest token, divided by the number of correct answers.
(import 'preset.libsonnet')('spo_3_2')
+ (import 'spo.libsonnet')
