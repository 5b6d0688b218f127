// "Exploring Paths" (SPO), the final form: towards the likeliest token, divided by the number of correct answers.
(import 'preset.libsonnet')('spo')
+ (import 'spo.libsonnet')
