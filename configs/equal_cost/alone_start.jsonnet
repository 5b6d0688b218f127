// One choice decides, a step of its own before 24 free ones: the start model of alone.jsonnet.
(import '../lib/decisive.libsonnet')('alone').start
