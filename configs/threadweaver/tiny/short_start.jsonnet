// The start model of the short runs with threads.
(import 'short.libsonnet').start
