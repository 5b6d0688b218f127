// VinePPO: a line is worth the difference of the values before and after it, each the mean of 3 continuations.
(import 'shared.libsonnet') + (import 'methods/vineppo.jsonnet') + { experiment_name: 'vineppo', credit+: { samples: 3 } }
