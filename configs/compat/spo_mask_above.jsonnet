// SPO 3.3 as its code runs it: only tokens above one half have a loss, so confident ones are pushed down and
// nothing is lifted.
{ trainer+: { objective+: { mask: 'above' } } }
