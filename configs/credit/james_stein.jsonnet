// RLOO's baseline, shrunk towards what the iteration's other problems earn: unbiased.
{ credit: { type: 'james_stein' } }
