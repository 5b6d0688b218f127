// How firmly a preference loss holds on to the start model.
{ trainer+: { objective+: { beta: 0.3 } } }
