// The start model of all others on this variant.
(import '../lib/signposts.libsonnet')('wandering').sft
