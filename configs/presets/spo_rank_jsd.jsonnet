// SPO, section 4.3: the sampled token becomes the first choice and those before it move down by one;
// Jensen–Shannon divergence, at most log 2 a token.
(import 'spo.jsonnet') + { trainer+: { objective+: { target: 'rank', divergence: 'jsd' } } }
