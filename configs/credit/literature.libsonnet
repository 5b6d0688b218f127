// Credits of the literature, of which docs/methods/credits_of_the_literature.md says what they are: each is
// configs/credit/NAME.jsonnet, and stands in a bench's `methods` as (import 'credit/literature.libsonnet').NAME.credit.
{
  // A baseline for each position of a group, from answers weighted by the energy of their paths.
  optimal_token_baseline: { credit: { type: 'optimal_token_baseline' } },

  // RLOO's baseline, shrunk towards what the iteration's other problems earn: unbiased.
  james_stein: { credit: { type: 'james_stein' } },
}
