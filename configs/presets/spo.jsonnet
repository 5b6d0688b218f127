// What "Exploring Paths" (SPO) does to the end: towards the likeliest token, divided by the correct answers.
(import 'preset.libsonnet')('spo')
+ (import 'spo.libsonnet')
