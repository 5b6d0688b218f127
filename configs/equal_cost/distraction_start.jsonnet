// Signposts with wandering before those that decide: what all methods start from.
(import '../lib/equal_cost.libsonnet')('distraction').start
