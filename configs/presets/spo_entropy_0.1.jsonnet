// "Exploring Paths" (SPO), section 4.2: as 3.2, with an entropy penalty of 0.1, so that the policy gets surer as it learns.
(import 'preset.libsonnet')('spo_entropy_0.1')
+ (import 'spo.libsonnet')
+ { trainer+: { objective+: { entropy_coef: -0.1 } } }
