// SPO ("Exploring Paths"), by the sections of its paper: configs/presets/NAME.jsonnet is the field NAME.
local spo(name, objective) = {
  [name]: (import 'preset.libsonnet')(name) + (import 'spo.libsonnet') + { trainer+: { objective+: objective } },
};

// To the end: towards the likeliest token, divided by the correct answers.
spo('spo', {})
// Section 3.1: towards the likeliest token, divided by the whole batch.
+ spo('spo_3_1', { normalise_by: 'batch' })
// Section 3.2: towards the likeliest token, divided by the correct answers.
+ spo('spo_3_2', {})
// Section 3.3: towards one half, as its formula stands. (compat/spo_mask_above.jsonnet is its code.)
+ spo('spo_3_3', { target: 'fixed' })
// Section 4.2: as 3.2, and the policy gets surer as it learns.
+ spo('spo_entropy_0.1', { entropy_coef: -0.1 })
+ spo('spo_entropy_0.5', { entropy_coef: -0.5 })
+ spo('spo_entropy_1.0', { entropy_coef: -1.0 })
// Section 4.3: the sampled token becomes the first choice and those before it move down by one;
// Jensen–Shannon divergence, at most log 2 a token.
+ spo('spo_rank_jsd', { target: 'rank', divergence: 'jsd' })
