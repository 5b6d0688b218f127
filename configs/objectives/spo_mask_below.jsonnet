// SPO 3.3 the other way: only unlikely tokens of correct answers are lifted, confident ones are left alone.
{ trainer+: { objective+: { mask: 'below' } } }
