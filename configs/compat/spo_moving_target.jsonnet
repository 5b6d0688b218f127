// SPO as its code runs it: no stop-gradient on the target, so the likeliest token is pushed down as the
// sampled one is pulled up, harder the less likely that one is.
{ trainer+: { objective+: { detach_target: false } } }
