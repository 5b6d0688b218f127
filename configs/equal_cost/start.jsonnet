// One choice decides, the first of sixteen: the start model of first.jsonnet and last.jsonnet.
(import '../lib/decisive.libsonnet')('first').start
