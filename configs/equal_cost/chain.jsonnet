// A policy gradient on the chain of sums, from the start model: a method goes on its right.
(import 'chain.libsonnet').on_policy
