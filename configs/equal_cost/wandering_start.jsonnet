// Signposts with wandering behind the one that decides: what all methods start from.
(import '../lib/equal_cost.libsonnet')('wandering').start
