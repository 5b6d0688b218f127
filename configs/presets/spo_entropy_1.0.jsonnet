// SPO, section 4.2: as 3.2, and the policy gets surer as it learns.
(import 'spo.jsonnet') + { trainer+: { objective+: { entropy_coef: -1.0 } } }
