// Signposts that must all be right: what all methods start from.
(import '../lib/equal_cost.libsonnet')('slips').start
