// SPO, section 3.3: towards one half, as its formula stands. (compat/spo_mask_above.jsonnet is its code.)
(import 'spo.jsonnet') + { trainer+: { objective+: { target: 'fixed' } } }
