// James-Stein baseline (arXiv:2511.03710): RLOO's baseline, shrunk towards what the iteration's other problems earn:
// unbiased.
{ credit: { type: 'james_stein' } }
