// What all methods on the chain of sums start from.
(import 'chain.libsonnet').start
