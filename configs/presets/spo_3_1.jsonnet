// SPO, section 3.1: towards the likeliest token, divided by the whole batch.
(import 'spo.jsonnet') + { trainer+: { objective+: { normalise_by: 'batch' } } }
