// Every rank holds everything.
{ trainer+: { zero_stage: 0 } }
