// A quarter of the quickstart's rate, for losses that few tokens have: Adam makes its steps as large from
// these as others' from all.
{ trainer+: { learning_rate: 1e-4 } }
