// "Exploring Paths" (SPO), section 3.3: towards one half, by the paper's formula. (compat/spo_mask_above.jsonnet is what its code does.)
(import 'preset.libsonnet')('spo_3_3')
+ (import 'spo.libsonnet')
+ { trainer+: { objective+: { target: 'fixed' } } }
