// Eight choices that must all be right: the start model of all.jsonnet.
(import '../lib/decisive.libsonnet')('all').start
