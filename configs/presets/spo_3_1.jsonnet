// SPO, section 3.1: towards the likeliest token, divided by the whole batch.
(import 'spo.libsonnet') + { trainer+: { objective+: { normalise_by: 'batch' } } }
