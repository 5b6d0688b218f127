// One choice decides, the first of 32: the start model of long.jsonnet.
(import '../lib/decisive.libsonnet')('long').start
