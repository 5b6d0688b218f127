// Sums of five two-digit numbers, a running total a line; the teacher slips on a quarter of the lines.
(import 'setting.libsonnet')(
  (import '../tasks/addition_chain.jsonnet') + { task+: { count: 5, demonstration_noise: 0.25 } },
  name='chain',
  max_tokens=64,
  budget=400000,
)
