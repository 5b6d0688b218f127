// Signposts of which the first decides: what all methods start from.
(import '../lib/equal_cost.libsonnet')('fork').start
