// "Exploring Paths" (SPO), section 4.3: the sampled token becomes the first choice, and those before it move down by one;
// Jensen–Shannon divergence, at most log 2 a token.
(import 'preset.libsonnet')('spo_rank_jsd')
+ (import 'spo.libsonnet')
+ { trainer+: { objective+: { target: 'rank', divergence: 'jsd' } } }
